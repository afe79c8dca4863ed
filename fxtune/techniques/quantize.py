"""A frozen base in 4 or 8 bits under trained adapters: nf4, MXFP4 and int8 for memory (QLoRA, arXiv 2305.14314), fp8
for speed.

In nf4 with double quantization frozen weights take 4.127 bits each: 3.4 GiB in place of 13 for the linears of an 8B
model. Each matmul dequantizes one of them (kernels/quantized.py), which makes a step a few percent slower with long
rows. Embeddings, norms and the output head keep model.dtype.

In fp8 (e4m3, one scale per row) the frozen linears' products run in fp8, forward and backward, at nearly twice
bfloat16's speed, over activations that each call quantizes row by row (kernels/fp8.py). It needs tensor cores of Ada,
Hopper or newer, and as much memory as bfloat16 if it keeps both W and W^T, or half of it if W^T is made when it is
needed (`transpose`).

The experts of a mixture, which are no linears, are quantized with them where one operator computes them
(quantized_experts.py). MXFP4 is for experts alone, at 4.25 bits a weight. gpt-oss ships its experts so: then they are
read as they are, also if the linears are in nf4 or int8, because to quantize them again would only add an error.

A model need not fit on the card before quantization: each linear goes to the card as it is replaced. It need not fit
in host memory either: then its linears are quantized one by one as they are read, in fp8 row by row
(models/shards.py). Only the adapter is saved; it loads onto the plain base.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from fxtune.distributed.world import World
from fxtune.errors import ConfigError
from fxtune.facts.options import ComputeDtype, Library, LoraOptions, QuantizeOptions, Switch, WeightFormat
from fxtune.facts.run import Facts
from fxtune.kernels.matmul import CAPABILITY
from fxtune.kernels.quantized import MXFP4, NF4_BLOCK, SCALE_BLOCK
from fxtune.models.prepared import PreparedModel, Quantization
from fxtune.models.replacement import places, put
from fxtune.models.structure import is_named, observed, skeleton
from fxtune.system.profiler import observe_operators, short_name
from fxtune.system.units import GIB
from fxtune.techniques.base import Evidence, Technique
from fxtune.techniques.lora.experts import follows_interface
from fxtune.techniques.lora.targets import matches
from fxtune.techniques.quantized_experts import (
    TENSORS,
    experts_of,
    hold_mxfp4,
    leaves_linears,
    quantize_experts,
    stored_as,
)
from fxtune.techniques.quantized_experts import refusal as refusal_of_experts
from fxtune.techniques.quantized_experts import stored_bytes as bytes_of_experts
from fxtune.techniques.quantized_modules import (
    Fp8Embedding,
    Fp8Head,
    bytes_per_weight,
    dequantized,
    embedding_of,
    head_of,
    is_quantized,
    quantized,
    stored_bytes,
)
from fxtune.upstream.torch import without_scaled_mm

EachWeight = Callable[[Mapping[str, tuple[int, ...]], Callable[[str, torch.Tensor], None]], None]
"""Hands each weight, of those by name and shape, to a function."""
OLDEST = {"nf4": (6, 0), "int8": (7, 5), "fp8": (8, 9), MXFP4: (8, 0)}
"""The oldest compute capability that the kernels support."""
INSTEAD = {"nf4": "Set enabled=false", "int8": "Use nf4", "fp8": "Use nf4 or int8", MXFP4: "Use nf4"}
WITHOUT_FP8 = "techniques.quantize.enabled=false, or parallel.shard=1 with techniques.quantize.type=nf4 or int8"
"""What trains where weights are to be divided over ranks and fp8, the only type that can be divided, does not run."""
WORST_ERROR = {"nf4": 0.15, "int8": 0.03, "fp8": 0.04, MXFP4: 0.2}
"""Limit of |dequantized - weight| / |weight|. For normal weights it is 0.09 in nf4, 0.01 in int8, 0.027 in fp8, 0.115
in MXFP4."""
SAME = 1e-3
"""Limit of that error for experts in MXFP4 that are unpacked and packed again, which is 0 except for the smallest
numbers of float16."""
TRANSPOSES = 1 / 8
"""The largest share of the free memory that `transpose=auto` gives to transposes."""
MULTIPLE = 16
"""Both sizes of a matrix in an fp8 product are multiples of this."""


@dataclass
class Quantize(QuantizeOptions, Technique):
    def check(self, facts: Facts) -> Iterator[str]:
        lora, kind, fp8 = facts.techniques.lora, self.type.value, self.type is WeightFormat.fp8
        if not lora.enabled:
            yield (
                f"enabled: weights in {kind} cannot be trained, only adapters over them. Set "
                "techniques.lora.enabled=true, or this to false."
            )
        yield from (
            self._check_fp8(facts) if fp8 else () if self.type is WeightFormat.mxfp4 else self._check_library(facts)
        )
        if self.type is WeightFormat.mxfp4 and self.library is not Library.auto:
            yield f"library: no package stores mxfp4, and this asks for {self.library.value}. Set it to auto."
        if self.type is WeightFormat.mxfp4 and self.skip:
            yield "skip: mxfp4 leaves all linears as they are. Set it to []."
        if self.type is not WeightFormat.nf4 and not self.double:
            yield f"double: only nf4's scales can be quantized, and type is {kind}. Set it to true, or type to nf4."
        if self.linears is Switch.off and self.type not in (WeightFormat.fp8, WeightFormat.mxfp4):
            yield f"linears: {kind} always quantizes linears. Set it to auto, or type to fp8."
        if self.linears is Switch.on and self.type is WeightFormat.mxfp4:
            yield "linears: mxfp4 is for experts alone. Set it to auto."
        if self.transpose is Switch.on and not fp8:
            yield f"transpose: only fp8 keeps one, and type is {kind}. Set it to auto, or type to fp8."
        if facts.device == "cuda":
            yield from self._check_card(facts)
        if self.compute_dtype is ComputeDtype.float16 and not fp8 and facts.compute_dtype != "float16":
            yield (
                "compute_dtype: float16 needs loss scaling, which comes with techniques.precision.autocast=float16 or "
                "model.dtype=float16. Set one of them, or compute_dtype to auto."
            )
        if lora.enabled and lora.init in ("pissa", "olora"):
            yield (
                f"enabled: techniques.lora.init={lora.init.value} moves a part of the weights into the adapter, and "
                "the rest would have to be quantized again. Use init=default."
            )
        model = skeleton(facts.model)
        if (self.head or self.embeddings) and not fp8:
            which = "head" if self.head else "embeddings"
            yield f"{which}: {kind} quantizes only the other linears. Set it to false, or type to fp8."
        elif model is not None:
            yield from self._check_ends(model, facts)
        if model is not None:
            yield from self._check_linears(model, facts)
        if self.experts is Switch.on and (why := self._experts_refusal(facts)):
            yield f"experts: {why}. Set it to auto."

    def _check_library(self, facts: Facts) -> Iterator[str]:
        library, lora = self._library(facts), facts.techniques.lora
        if library is None:
            both = [f"{one} {facts.lacks(one)}" for one in ("bitsandbytes", "torchao")]
            why = " and ".join(both) if facts.broken else "neither bitsandbytes nor torchao is installed"
            yield f"library: {why}. Install one: pip install 'fxtune[quant]'."
        elif library.value not in facts.packages:
            why = facts.lacks(library.value)
            yield f"library: {library.value} {why}. Install it: pip install 'fxtune[quant]'. Or use auto."
        if self.type is WeightFormat.nf4 and library is Library.torchao and not self.double:
            yield "double: torchao's nf4 always quantizes its scales. Set it to true, or library to bitsandbytes."
        if lora.enabled and lora.dora and library is Library.torchao:
            yield (
                "library: techniques.lora.dora=true measures the norms of the weights, which peft cannot read from "
                "torchao's. Use bitsandbytes."
            )

    def _check_fp8(self, facts: Facts) -> Iterator[str]:
        if facts.device != "cuda":
            yield (
                f"type: fp8's products run on a GPU's tensor cores, and the device is {facts.device}. "
                f"{_instead(self.type, facts)}."
            )
        yield from (f"type: {missing}. Use nf4." for missing in without_scaled_mm("_scaled_mm", "_scaled_grouped_mm"))
        if self.library is not Library.auto:
            yield f"library: torch computes fp8 products, without {self.library.value}. Set it to auto."
        is_auto = self.compute_dtype is ComputeDtype.auto
        compute = facts.compute_dtype if is_auto else self.compute_dtype.value
        if compute != "bfloat16":
            others = "techniques.precision.autocast=bfloat16 or model.dtype=bfloat16"
            change = others if is_auto else "it to auto or bfloat16"
            yield f"compute_dtype: fp8's products are bfloat16, and this asks for {compute}. Set {change}."
        if facts.techniques.lora.enabled and facts.techniques.lora.dora:
            yield (
                "type: techniques.lora.dora=true measures the norms of the weights, and peft cannot read fp8's. Use "
                "nf4 or int8."
            )

    def _check_ends(self, model: Any, facts: Facts) -> Iterator[str]:
        """Reasons why this model's head and embeddings cannot be in fp8."""
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        if self.head and (type(head) is not nn.Linear or head.out_features % MULTIPLE or head.in_features % MULTIPLE):
            yield (
                f"head: a product in fp8 takes a plain linear with sizes of a multiple of {MULTIPLE}, and this model "
                f"has a {type(head).__name__} of {tuple(head.weight.shape)}. Set it to false."
            )
        if self.embeddings and type(embedding) is not nn.Embedding:
            yield f"embeddings: this model has a {type(embedding).__name__}, not a plain embedding. Set it to false."
        if self.embeddings and facts.tied_embeddings and not self.head:
            yield "embeddings: this model's head and embeddings are one tensor. Set head=true, too, or this to false."
        lora = facts.techniques.lora
        trained = {*lora.modules_to_save, *lora.target_modules} if lora.enabled else set()
        for option, module in (("head", head), ("embeddings", embedding)):
            names = [name for name, one in model.named_modules() if one is module]
            if not getattr(self, option):
                continue
            if any(matches(names[0], str(one)) for one in trained):
                yield (
                    f"{option}: techniques.lora trains {names[0]}, and fp8 weights are frozen. Set it to false, or "
                    "remove it from target_modules and modules_to_save."
                )
            elif lora.enabled and lora.train_tokens:
                yield (
                    f"{option}: techniques.lora.train_tokens trains rows of {names[0]}, and fp8 weights are frozen. "
                    "Set it to false, or train_tokens to null."
                )

    def _check_card(self, facts: Facts) -> Iterator[str]:
        oldest = OLDEST[self.type.value]
        if (facts.capability or oldest) < oldest:
            number = ".".join(map(str, facts.capability or ()))
            yield (
                f"type: {self.type.value} needs compute capability {oldest[0]}.{oldest[1]}, and {facts.device_name} "
                f"has {number}. {_instead(self.type, facts)}."
            )
        if (facts.capability or (8, 0)) < (8, 0) and self.compute_dtype is ComputeDtype.bfloat16:
            yield f"compute_dtype: {facts.device_name} has no bfloat16 units. Use float32, or auto."

    def _check_linears(self, model: nn.Module, facts: Facts) -> Iterator[str]:
        """Reasons why this model's linears cannot be quantized, and why the model does not fit."""
        found = [(name, linear) for name, _, _, linear in self._targets(model, self.takes_experts(facts))]
        total = sum(parameter.numel() for parameter in model.parameters())
        if self.type is WeightFormat.mxfp4 and not self.takes_experts(facts):
            why = self._experts_refusal(facts) or "experts=off keeps them in 16 bits"
            yield f"type: mxfp4 is for the experts of a mixture, and {why}. Use nf4."
            return
        if not found and not self._expert_weights(model, facts):
            yield (
                f"enabled: 0 % of this model's {total:,} parameters are in linears besides its head and what skip "
                "names. Set it to false."
            )
            return
        every = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        for name in self.skip:
            if not any(is_named(there, name) for there in every):
                there = ", ".join(sorted({one.rpartition(".")[2] for one in every}))
                yield f"skip: this model has no linear {name}. Its linears are {there}."
        lora = facts.techniques.lora
        saved = lora.modules_to_save if lora.enabled else []
        if trained := [name for name in saved if any(is_named(there, name) for there, _ in found)]:
            yield (
                f"skip: techniques.lora.modules_to_save trains {', '.join(trained)}, and quantized weights cannot be "
                "trained. Add it to skip."
            )
        uneven = [name for name, linear in found if linear.weight.numel() % (NF4_BLOCK * SCALE_BLOCK)]
        if uneven and self.type is WeightFormat.nf4 and self._library(facts) is Library.torchao:
            yield (
                f"library: torchao's nf4 needs weights of a multiple of {NF4_BLOCK * SCALE_BLOCK:,} elements, and "
                f"{len(uneven)} are not, such as {uneven[0]}. Use bitsandbytes, or name them in skip."
            )
        odd = [name for name, linear in found if linear.in_features % MULTIPLE or linear.out_features % MULTIPLE]
        if odd and self.type is WeightFormat.fp8:
            yield (
                f"type: fp8's products take sizes of a multiple of {MULTIPLE}, and {len(odd)} linears have others, "
                f"such as {odd[0]}. Use nf4 or int8, or name them in skip."
            )
        if facts.device == "cuda" and facts.free_memory:
            inside = sum(linear.weight.numel() for _, linear in found) + self._expert_weights(model, facts)
            yield from self._check_memory(facts, total, inside)

    def _check_memory(self, facts: Facts, total: int, inside: int) -> Iterator[str]:
        """Reasons why a model of `total` weights, `inside` of them in linears, does not fit before or after
        quantization."""
        size = 4 if facts.dtype == "float32" else 2
        least = bytes_per_weight(self.type.value, self.double, self.transpose is Switch.on)
        before = total * size / GIB
        after = before - inside * (size - least) / GIB
        free, host = facts.free_memory / GIB, facts.host_memory / GIB
        if (parts := facts.degrees.shard) > 1:  # each rank reads and quantizes a matrix at a time
            after, before = after / parts, 0.0
        if after > free:
            which = "the quantized model" if parts == 1 else "a rank's part of the quantized model"
            yield (
                f"enabled: {which} takes {after:.1f} GiB, and the card has {free:.1f} GiB free. Use a "
                "smaller model" + ("." if self.type in (WeightFormat.nf4, WeightFormat.mxfp4) else ", or type=nf4.")
            )
        elif before > max(free, host) and not self.takes_rows(
            facts.techniques.lora, skeleton(facts.model), facts.ships_mxfp4 and self.takes_experts(facts)
        ):
            yield (
                f"enabled: before quantization the model takes {before:.1f} GiB in {facts.dtype}, and neither the "
                f"card ({free:.1f} GiB free) nor the host ({host:.1f} GiB) holds that. Use a smaller model"
                + (", or model.dtype=bfloat16." if size == 4 else ".")
            )

    def resolve(self, facts: Facts) -> str | None:
        chosen = []
        if self.type is WeightFormat.fp8:
            chosen.append("torch multiplies the fp8 weights")
        elif (
            self.type is not WeightFormat.mxfp4 and self.library is Library.auto and (library := self._library(facts))
        ):
            self.library = library
            chosen.append(f"{library.value} stores the {self.type.value} weights")
        chosen += self._resolve_experts(facts)
        if self.type is WeightFormat.fp8 and self.transpose is Switch.auto:
            chosen.append(self._resolve_transpose(facts))
        if self.type is not WeightFormat.fp8:
            self.transpose = Switch.off
            self.linears = Switch.off if self.type is WeightFormat.mxfp4 else Switch.on
        if self.compute_dtype is ComputeDtype.auto:
            self.compute_dtype = ComputeDtype(facts.compute_dtype)
            chosen.append(f"matmuls run in {self.compute_dtype.value} like the rest of the model")
        return "; ".join(chosen) or None

    def _resolve_transpose(self, facts: Facts) -> str:
        model = skeleton(facts.model)
        linears = self._targets(model, self.takes_experts(facts)) if model is not None else ()
        weights = sum(linear.weight.numel() for *_, linear in linears)
        weights = (weights + self._expert_weights(model, facts)) // facts.degrees.shard
        short = bool(facts.free_memory) and weights > TRANSPOSES * facts.free_memory
        self.transpose = Switch.off if short else Switch.on
        if short:
            return f"the backward pass transposes them, because kept transposes would take {weights / GIB:.1f} GiB"
        return "their transposes are kept"

    def _resolve_experts(self, facts: Facts) -> Iterator[str]:
        """Decide `experts`; a line if this model has any."""
        model, why = skeleton(facts.model), self._experts_refusal(facts)
        has_any = model is not None and any(experts_of(model))
        if self.experts is Switch.auto:
            self.experts = Switch.off if why else Switch.on
            if has_any and why:
                yield f"experts stay in {facts.dtype} ({why})"
        if has_any and self.experts is Switch.on and not why:
            if self._experts_type(facts.ships_mxfp4) is not self.type:
                yield "experts stay in MXFP4, as the checkpoint stores them"
            elif self.type is WeightFormat.mxfp4:
                yield "experts in mxfp4" + (", as the checkpoint stores them" if facts.ships_mxfp4 else "")
            else:
                yield f"experts in {self.type.value}, too"
        if self.linears is Switch.auto and self.type is WeightFormat.fp8:
            off = model is not None and not any(self._targets(model, self.experts is Switch.on))
            self.linears = Switch.off if off else Switch.on
            if off:
                yield f"other linears stay in {facts.dtype} (all are small)"

    def _experts_type(self, shipped: bool) -> WeightFormat:
        """How experts are stored. `shipped`: whether the checkpoint has them in MXFP4."""
        return WeightFormat.mxfp4 if shipped and self.type is not WeightFormat.fp8 else self.type

    def _experts_refusal(self, facts: Facts) -> str | None:
        """Why the experts cannot be quantized under `facts`."""
        model = skeleton(facts.model)
        if model is None or not any(experts_of(model)):
            return "this model has no experts that transformers keeps as one tensor for each product"
        if self.type is WeightFormat.fp8 and facts.capability and facts.capability != CAPABILITY:
            number = ".".join(map(str, facts.capability))
            return f"grouped products in fp8 are for compute capability 9.0 (H100, H200), and this card has {number}"
        if facts.degrees.shard > 1:
            return f"parallel.shard={facts.degrees.shard} divides quantized linears, and no experts"
        if facts.techniques.lora.grouped_experts is Switch.off:
            return "techniques.lora.grouped_experts=off adds adapters to whole weights of 16 bits"
        paths = [path for path, one in model.named_modules() if follows_interface(one)]
        for saved in facts.techniques.lora.modules_to_save:
            if any(f".{saved}." in f".{path}." for path in paths):
                return f"techniques.lora.modules_to_save={saved} trains whole experts, and quantized ones are frozen"
        if skipped := [
            skip for skip in self.skip for name in TENSORS for path in paths if is_named(f"{path}.{name}", skip)
        ]:
            return (
                f"techniques.quantize.skip={skipped[0]} names a part of the experts, and experts are quantized whole"
            )
        library = self._library(facts)
        kind = self._experts_type(facts.ships_mxfp4).value, library.value if library else ""
        return next(filter(None, (refusal_of_experts(experts, *kind) for experts in experts_of(model))), None)

    def takes_experts(self, facts: Facts) -> bool:
        """Whether the experts are quantized under `facts`, also before `auto` is decided."""
        return self.experts is not Switch.off and self._experts_refusal(facts) is None

    def _expert_weights(self, model: nn.Module | None, facts: Facts) -> int:
        """The number of weights of experts that are quantized."""
        if model is None or not self.takes_experts(facts):
            return 0
        return sum(getattr(one, name).numel() for one in experts_of(model) for name in TENSORS)

    def takes_rows(self, lora: LoraOptions, model: nn.Module | None, shipped: bool = False) -> bool:
        """Whether the weights of `model`, a skeleton, can be quantized as they are read, so that they need not fit
        anywhere in 16 bits. `shipped`: whether its experts stay in MXFP4, in which the checkpoint has them."""
        if lora.dora or lora.factored or lora.modules_to_save or model is None:
            return False
        # transformers converts the files of mixtures as it reads them.
        return shipped or not any(map(follows_interface, model.modules()))

    def keeps_shipped(self, lora: LoraOptions, model: nn.Module | None) -> bool:
        """Whether experts that a checkpoint stores in MXFP4 are read as they are. Resolved options only."""
        kept = self.enabled and self.experts is Switch.on and self._experts_type(True) is WeightFormat.mxfp4
        return kept and self.takes_rows(lora, model, True)

    def packages(self, facts: Facts) -> Iterator[str]:
        if self.type not in (WeightFormat.fp8, WeightFormat.mxfp4) and (library := self._library(facts)):
            yield library.value

    def _library(self, facts: Facts) -> Library | None:
        if self.library is not Library.auto:
            return self.library
        there = [one for one in (Library.bitsandbytes, Library.torchao) if one.value in facts.packages]
        return there[0] if there else None

    def _targets(self, model: Any, experts: bool) -> Iterator[tuple[str, nn.Module, str, nn.Linear]]:
        """(full name, parent, name in it, linear) of each linear to quantize: all but the head and those in `skip`;
        none where they stay in 16 bits beside the `experts`."""
        head, found = model.get_output_embeddings(), []
        for path, parent in model.named_modules():
            for name, module in parent.named_children():
                full = f"{path}.{name}" if path else name
                skipped = module is head or any(is_named(full, skip) for skip in self.skip)
                if isinstance(module, nn.Linear) and not skipped:
                    found.append((full, parent, name, module))
        if not leaves_linears(self, experts, max((linear.weight.numel() for *_, linear in found), default=0)):
            yield from found

    def apply(self, model: PreparedModel, world: World) -> None:
        """Replace the linears one by one, so the device holds at most one extra linear (in fp8 three of its size)."""
        self._replace_linears(model, world)

    def apply_as_read(self, model: PreparedModel, world: World, each_weight: EachWeight) -> dict[str, tuple[int, ...]]:
        """apply() to a model without memory, whose linears cannot be quantized row by row, and whose experts, if it
        has any, the checkpoint stores in MXFP4. Returns the names and shapes of the weights that it has read by
        `each_weight`."""
        targets = self._targets(model.module, False)
        wanted = {f"{name}.weight": tuple(linear.weight.shape) for name, _, _, linear in targets}
        self._replace_linears(model, world, partial(each_weight, wanted))
        return wanted

    def _replace_linears(
        self,
        prepared: PreparedModel,
        world: World,
        each_weight: Callable[[Callable[[str, torch.Tensor], None]], None] | None = None,
    ) -> None:
        model, compute = prepared.module, getattr(torch, self.compute_dtype.value)
        targets = list(self._targets(model, self.experts is Switch.on))
        if not targets and self.experts is not Switch.on:  # check() cannot know models with code of their own
            raise ConfigError("techniques.quantize.enabled: this model has no linears to quantize. Set it to false.")
        every = sum(parameter.numel() for parameter in model.parameters())
        experts = list(experts_of(model)) if self.experts is Switch.on else []
        of_experts = [getattr(one, name) for one in experts for name in TENSORS]
        share = (sum(linear.weight.numel() for *_, linear in targets) + sum(one.numel() for one in of_experts)) / every
        before, after, worst = sum(one.nbytes for one in of_experts), 0, 0.0
        ships = prepared.ships_mxfp4
        kind = self._experts_type(ships)
        shipped = "" if not experts or not ships or kind is not WeightFormat.mxfp4 else "unpacked and packed again"
        del of_experts
        error = math.nan
        waiting = {f"{path}.weight": (parent, name, linear) for path, parent, name, linear in targets}
        del targets[:]

        def replace(path: str, weight: torch.Tensor) -> None:
            nonlocal before, after, error
            parent, name, linear = waiting.pop(path)
            linear.weight = nn.Parameter(weight.detach(), requires_grad=False) if each_weight else linear.weight
            options = self.type.value, self.library.value, self.double, compute, world.device
            made = quantized(linear, *options, self.transpose is not Switch.off)
            if math.isnan(error) and not linear.weight.is_meta:
                whole = linear.weight.detach().to(world.device).float()
                error = ((dequantized(made).float() - whole).norm() / whole.norm()).item()
                del whole
            before += linear.weight.nbytes
            after += stored_bytes(made)
            setattr(parent, name, made)

        count = len(waiting)
        where = places(model) if experts else {}
        held = [hold_mxfp4(one, compute) for one in experts] if each_weight is not None else []
        for one, stored in zip(experts, held, strict=False):  # before the names of all weights are compared
            put(where, one, stored)
            shipped = "read as they are"
        if each_weight is not None:
            each_weight(replace)
        for path in list(waiting):
            replace(path, waiting[path][2].weight)
        for one in experts if each_weight is None else ():
            options = kind.value, self.library.value, self.double, compute, world.device
            stored, off = quantize_experts(one, *options, self.transpose is not Switch.off)
            put(where, one, stored)
            held.append(stored)
            worst = max(worst, off)
        after += sum(map(bytes_of_experts, held))
        ends = self._quantize_ends(model, compute, world)
        _move(model, world.device)
        if world.device.type == "cuda":
            torch.cuda.empty_cache()  # else the next allocations would split the 16-bit weights' blocks
            torch.cuda.reset_peak_memory_stats(world.device)  # the reported peak is that of training
        if self.library is Library.bitsandbytes:  # peft reads these before it wraps
            model.is_loaded_in_4bit, model.is_loaded_in_8bit = (
                self.type is WeightFormat.nf4,
                self.type is WeightFormat.int8,
            )
        prepared.quantization = Quantization(
            count, before, after, error, share, ends, len(experts), self._name(kind), worst, shipped
        )

    def _quantize_ends(self, model: Any, compute: torch.dtype, world: World) -> list[str]:
        """Replace the head and the embeddings if their options are on. Returns a line about each."""
        head, embedding, notes = model.get_output_embeddings(), model.get_input_embeddings(), []
        shared = None
        if self.embeddings:
            made = embedding_of(embedding, compute, world.device)
            model.set_input_embeddings(made)
            shared = made if head is not None and head.weight is embedding.weight else None
            notes.append(f"embeddings {stored_bytes(made) / GIB:.3g} GiB")
        if self.head:
            last = head_of(head, compute, world.device, shared)
            model.set_output_embeddings(last)
            notes.append("head with the embeddings' codes" if shared else f"head {stored_bytes(last) / GIB:.3g} GiB")
        return notes

    def verify(self, prepared: PreparedModel, probe: dict[str, Any]) -> Iterator[Evidence]:
        model, done = prepared.module, prepared.quantization
        assert done is not None, "apply() has filled it in"
        linears: list[Any] = [module for module in model.modules() if is_quantized(module)]
        kinds = {module.stored_as for module in linears}
        evidence = partial(Evidence, "quantize")
        wanted = self._name(self.type)
        experts = list(filter(stored_as, model.modules()))
        kinds_of_experts = {stored_as(one) for one in experts}
        stored = sum(map(stored_bytes, linears)) + sum(map(bytes_of_experts, experts))
        seen_as = ", ".join(sorted(kinds)) or wanted, ", ".join(sorted(kinds_of_experts))
        yield evidence(
            _inside(f"{done.linears} linears", done.experts, wanted, done.experts_as),
            f"{_inside(str(len(linears)), len(experts), *seen_as)}, {done.share:.1%} of the model: "
            f"{done.before / GIB:.3g} GiB became {stored / GIB:.3g} GiB",
            (len(linears), len(experts), stored) == (done.linears, done.experts, done.after)
            and kinds == ({wanted} if linears else set())
            and kinds_of_experts == ({done.experts_as} if experts else set())
            and (self.type is WeightFormat.fp8 or stored < done.before),
        )
        worst = WORST_ERROR[self.type.value]
        error, which = done.error, "in the first linear"
        if divided := [one.rounding for one in model.modules() if getattr(one, "rounding", 0.0)]:
            error, which = max(divided), f"at most in the first rows of {len(divided)} matrices"
        if experts and not done.shipped:
            error = max(done.experts_error, error if linears else 0.0)
            which = "at most in the first linear and an expert of each layer"
        if linears or not done.shipped:
            yield evidence(
                f"weights close to the base's (relative error below {worst})",
                f"{error:.4f} {which}",
                0 < error < worst,
            )
        if done.shipped:
            codes = sum(bool(weights[0].any()) for one in experts for weights in one.stored_weights())
            yield evidence(
                "the experts that the checkpoint has in MXFP4, unchanged",
                f"{codes} tensors {done.shipped}, relative error {done.experts_error:.1g}",
                codes == len(TENSORS) * len(experts) and done.experts_error < SAME,
            )
        frozen = (one for module in (*linears, *experts) for one in module.parameters())
        trained = sum(one.requires_grad for one in frozen)
        made = [dequantized(linears[0]).dtype] if linears else []
        made += [one.compute_dtype for one in experts if self.type is not WeightFormat.fp8]
        dtypes = {str(one).removeprefix("torch.") for one in made}
        yield evidence(
            f"frozen, dequantized to {self.compute_dtype.value}",
            f"{trained} of them trained, dequantized to {', '.join(dtypes) or 'nothing'}",
            not trained and dtypes <= {self.compute_dtype.value},
        )
        if self.head or self.embeddings:
            ends = [model.get_output_embeddings()] * self.head + [model.get_input_embeddings()] * self.embeddings
            yield evidence(
                " and ".join(["head"] * self.head + ["embeddings"] * self.embeddings) + " in fp8",
                ", ".join(done.ends),
                all(isinstance(one, Fp8Head | Fp8Embedding) for one in ends),
            )
        if self.type is WeightFormat.fp8 or experts:
            with observed(model), torch.no_grad(), torch.compiler.set_stance("force_eager"):
                operators = {"fp8": r"^aten::_scaled_mm$", "experts": r"^fxtune::(fp8|gated)_experts$"}
                every = observe_operators(lambda: model(**probe), operators)
            seen = every["fp8"]
            kernels = ", ".join(sorted({short_name(name) for name in seen.kernels}))
            if self.type is WeightFormat.fp8 and (linears or self.head):
                yield evidence(
                    "products in fp8",
                    f"{seen.calls} of torch's scaled products in a forward pass"
                    + (f" ({kernels})" if kernels else ""),
                    seen.calls > 0,
                )
            if experts:
                ran = every["experts"].calls
                yield evidence(
                    f"the experts of {len(experts)} layers as one operator "
                    + ("in fp8" if self.type is WeightFormat.fp8 else f"over {done.experts_as}"),
                    f"it ran {ran} times in a forward pass",
                    ran == len(experts),
                )

    def _name(self, kind: WeightFormat) -> str:
        """How quantized modules name this type."""
        packs = kind in (WeightFormat.nf4, WeightFormat.int8)
        return f"{kind.value}/{self.library.value}" if packs else kind.value


def _inside(linears: str, layers: int, kind: str, kind_of_experts: str) -> str:
    if not layers:
        return f"{linears} in {kind}"
    experts = f"the experts of {layers} layers in {kind_of_experts}"
    return f"{linears} and {experts}" if kind == kind_of_experts else f"{linears} in {kind} and {experts}"


def _move(model: nn.Module, device: torch.device) -> None:
    """Move parameters and buffers to `device`. Parameters stay the same objects, so tied ones stay tied."""
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.device != device and not parameter.is_meta:
                parameter.data = parameter.data.to(device)
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)


def _instead(kind: WeightFormat, facts: Facts) -> str:
    """What to set where `kind` cannot run on this device."""
    if kind is not WeightFormat.nf4 and facts.degrees.shard > 1:
        return f"Set {WITHOUT_FP8}"
    return INSTEAD[kind.value]
