"""A frozen base in 4 or 8 bits under trained adapters: nf4, MXFP4 and int8 for memory (QLoRA, arXiv 2305.14314), fp8
for speed.

In nf4 with double quantization a frozen weight takes 4.127 bits. The linears of an 8B model take 3.4 GiB and not 13.
Each matmul dequantizes its weight (kernels/quantized.py), so a step with long rows takes a few percent longer.
Embeddings, norms and the output head keep model.dtype.

In fp8 (e4m3, one scale per row) the frozen linears' products run in fp8, forward and backward, at nearly twice
bfloat16's speed. Each call quantizes the activations row by row (kernels/fp8.py). The type fp8 needs tensor cores of
Ada, Hopper or newer. It takes the memory of bfloat16 if W and W^T are stored, and half of this memory if W^T is made
when it is needed.

The experts of a mixture are no linears. They are quantized too if one operator computes them (experts/quantized.py).
MXFP4 is for experts alone and takes 4.25 bits a weight. gpt-oss ships its experts in MXFP4. Such experts are read
without a change, also if the linears are in nf4 or int8: quantizing them again would only add an error.

A model need not fit on the card before quantization, because each linear moves to the card when it is replaced. If the
model does not fit in host memory either, its linears and experts are quantized one tensor after the other as they are
read, in fp8 row by row (models/shards.py). Only the adapter is saved, and it loads onto the plain base.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fxtune.distributed.world import World
from fxtune.facts.execution import Execution, Quantized
from fxtune.facts.options import DType, QuantizeOptions, Switch, WeightFormat
from fxtune.facts.run import Facts
from fxtune.models.dims import Shape
from fxtune.models.experts import experts_of
from fxtune.models.prepared import PreparedModel
from fxtune.models.structure import skeleton
from fxtune.system.terminal.units import GIB
from fxtune.techniques.base import Evidence, Technique
from fxtune.techniques.experts.quantized import TENSORS, leaves_linears
from fxtune.techniques.quantize import check, selection, verify
from fxtune.techniques.quantize.apply import Take, quantize_model
from fxtune.techniques.quantize.check import PACKAGE
from fxtune.techniques.quantized_modules import bytes_per_weight

EachWeight = Callable[[Mapping[str, tuple[int, ...]], Take], None]
"""A function that gets the names and shapes of weights, and hands each of these weights to a Take."""
TRANSPOSES = 1 / 8
"""The largest share of the free memory that stored transposes may take. Without stored transposes each backward
product transposes its codes. This takes 1 or 2 % of a step."""


@dataclass
class Quantize(QuantizeOptions, Technique):
    def check(self, facts: Facts) -> Iterator[str]:
        return check.refusals(self, facts)

    def resolve(self, facts: Facts) -> str | None:
        chosen = []
        if self.type is WeightFormat.fp8:
            chosen.append("torch multiplies the fp8 weights")
        chosen += self._resolve_experts(facts)
        if self.type is WeightFormat.fp8:
            chosen.append(self._resolve_transposes(facts))
        if self.compute_dtype is DType.auto:
            self.compute_dtype = DType(facts.compute_dtype)
            chosen.append(f"matmuls run in {self.compute_dtype.value} like the rest of the model")
        return "; ".join(chosen) or None

    def describe(self, facts: Facts, execution: Execution) -> Execution:
        experts = self.experts is Switch.on
        stays = leaves_linears(self, experts, Shape.of(facts.model).largest_linear)
        size = bytes_per_weight(self.type.value, self.keeps_transposes)
        multiplies = self.type is WeightFormat.fp8
        return replace(
            execution, quantized=Quantized(size, multiplies, not stays, experts, self.head, self.embeddings)
        )

    def _resolve_transposes(self, facts: Facts) -> str:
        if facts.is_frozen:
            self.keeps_transposes = False
            return "no transposes are kept, because there is no backward pass"
        model = skeleton(facts.model)
        linears = selection.linears_of(self, model, selection.takes_experts(self, facts)) if model is not None else ()
        weights = sum(linear.weight.numel() for *_, linear in linears)
        weights = (weights + selection.expert_weights(self, model, facts)) // facts.degrees.shard
        short = bool(facts.free_memory) and weights > TRANSPOSES * facts.free_memory
        self.keeps_transposes = not short
        if short:
            return f"the backward pass transposes them, because kept transposes would take {weights / GIB:.1f} GiB"
        return "their transposes are kept"

    def _resolve_experts(self, facts: Facts) -> Iterator[str]:
        """Decide `experts`, and yield a line about the decision if this model has experts."""
        model, why = skeleton(facts.model), selection.experts_refusal(self, facts)
        has_any = model is not None and any(experts_of(model))
        if self.experts is Switch.auto:
            self.experts = Switch.off if why else Switch.on
            if has_any and why:
                yield f"experts stay in {facts.dtype} ({why})"
        if has_any and self.experts is Switch.on and not why:
            if selection.experts_type(self, facts.ships_mxfp4) is not self.type:
                yield "experts stay in MXFP4, as the checkpoint stores them"
            elif self.type is WeightFormat.mxfp4:
                yield "experts in mxfp4" + (", as the checkpoint stores them" if facts.ships_mxfp4 else "")
            else:
                yield f"experts in {self.type.value}, too"
        in_fp8 = self.type is WeightFormat.fp8 and model is not None
        if in_fp8 and not any(selection.linears_of(self, model, self.experts is Switch.on)):
            yield f"other linears stay in {facts.dtype} (all are small)"

    def packages(self, facts: Facts) -> Iterator[str]:
        if self.type in (WeightFormat.nf4, WeightFormat.int8):
            yield PACKAGE

    def apply(self, model: PreparedModel, world: World) -> None:
        quantize_model(self, model, world)

    def apply_as_read(self, model: PreparedModel, world: World, each_weight: EachWeight) -> dict[str, tuple[int, ...]]:
        """apply() for a model without memory, in a type that cannot be quantized row by row. `each_weight` reads the
        weights, except experts that the checkpoint stores in MXFP4. Returns the names and shapes of the weights that
        were read."""
        targets = selection.linears_of(self, model.module, False)
        wanted = {f"{name}.weight": tuple(linear.weight.shape) for name, _, _, linear in targets}
        if self.experts is Switch.on and not model.ships_mxfp4:
            experts = {*experts_of(model.module)}
            for path, module in model.module.named_modules():
                if module in experts:
                    wanted.update({f"{path}.{name}": tuple(getattr(module, name).shape) for name in TENSORS})
        quantize_model(self, model, world, partial(each_weight, wanted))
        return wanted

    def verify(self, model: PreparedModel, probe: dict[str, Any]) -> Iterator[Evidence]:
        return verify.observe(self, model, probe)
