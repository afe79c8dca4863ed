"""Checks the loss: runs the same global batch through the recipe's techniques and through plain transformers.

The reference is plain transformers (and peft): one document per forward pass, nothing packed, fused, recomputed or
compiled, and cross-entropy of float32 logits. What changes the mathematics by design stays on in the reference: scaled
RoPE, adapters, a quantized base, and, except in the float32 reference, fp8 products of trained weights. Dropout is off
everywhere, because two passes would never agree.

In float32 both must agree to rounding. In bfloat16 and float16 no two orders of summation agree: plain transformers in
that precision measures the error of rounding alone, and the error of fxtune may be twice as large, plus a fraction of
the dtype's epsilon.

The B of a new adapter is zero, which would hide an error in its A, so each gets fixed values here. One model is in
memory at a time, and the plain ones run before those with fxtune's own code. Several ranks run the step together as in
training, and are compared with plain transformers in one process, that of rank 0.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from fxtune.data.batches.batch import IGNORE_INDEX, Batch
from fxtune.data.batches.plan import Plan
from fxtune.distributed.parallel import ParallelConfig
from fxtune.distributed.world import World
from fxtune.errors import ConfigError, HardwareError, MemoryShortError
from fxtune.facts.options import RopeType, Switch
from fxtune.facts.run import Facts
from fxtune.models.prepared import PreparedModel
from fxtune.objectives.causal_lm import CausalLM
from fxtune.techniques.attention.technique import Attention
from fxtune.techniques.float8 import Float8
from fxtune.techniques.lora.trained_tokens import as_peft
from fxtune.techniques.pipeline import Pipeline
from fxtune.techniques.precision import LossScale, Precision
from fxtune.training.agreement import together
from fxtune.training.builder import RunBuilder
from fxtune.upstream.torch import remove_forward_hooks

BY_DESIGN = ("rope", "precision", "quantize", "float8", "lora", "plugins")
"""Techniques that change the result, and so stay on in the reference. The others must not change it."""
OPTIONAL = tuple(entry.name for entry in dataclasses.fields(Pipeline) if entry.name not in BY_DESIGN)
EXACT = (1e-5, 1e-5, 1e-4)
"""Relative bounds in float32: of the loss, the full gradient, and the gradient of the worst parameter."""
SLACK = (1 / 8, 1 / 2, 1.0)
"""In other precisions: epsilons of the dtype, added to twice the error of plain transformers."""
MIN_NORM = 0.01
"""The error of a parameter's gradient is relative to its norm, or to this fraction of the mean norm if that is more:
the gradient of a key's bias, for example, is zero except for rounding."""
EPSILON = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "tf32": 2.0**-11}


@dataclass(frozen=True)
class Compared:
    """One variant compared with the reference."""

    name: str
    loss: float
    """Nats per supervised token."""
    loss_off: float
    """|loss - reference| / reference"""
    gradient_off: float
    """|g - reference| / |reference|, with all trained parameters as one vector"""
    worst: str
    """The parameter whose gradient has the largest error."""
    worst_off: float
    bounds: tuple[float, float, float]
    """For loss, gradient and worst parameter."""

    @property
    def within(self) -> bool:
        return not self.beyond()

    def beyond(self) -> list[str]:
        """What is out of its bound, as text. NaN is out of every bound."""
        offs = {"loss": self.loss_off, "gradient": self.gradient_off, f"gradient of {self.worst}": self.worst_off}
        return [
            f"{what} off by {off:.1e} (at most {bound:.1e})"
            for (what, off), bound in zip(offs.items(), self.bounds, strict=True)
            if not off <= bound
        ]


@dataclass
class _Result:
    loss: float
    gradients: dict[str, torch.Tensor]
    """float32, in host memory."""


def compare(builder: RunBuilder, plan: Plan, each: bool, tell: Callable[[str], None]) -> list[Compared]:
    """Compare the first step of `plan` in each split into micro-batches; with `each`, also with each technique off in
    turn. `tell` gets a line when a variant begins.

    Raises ConfigError if there is no reference, HardwareError if it does not fit.
    """
    if not isinstance(builder.config.objective, CausalLM):
        raise ConfigError(
            f"objective={builder.config.objective.name}: plain transformers computes the cross-entropy of causal_lm "
            "alone, so there is no reference. Leave --loss and --each out."
        )
    if builder.techniques.rope.enabled and builder.techniques.rope.type is RopeType.dynamic:
        raise ConfigError(
            "techniques.rope.type=dynamic rotates a document's tokens by angles that depend on the whole row, so "
            "there is no reference, document by document. Use yarn or linear."
        )
    return list(_Comparison(builder, plan, tell).run(each))


def describe_bounds(builder: RunBuilder) -> str:
    precision, reference = (
        precision_of(builder.facts),
        "Reference: plain transformers in float32, each document alone.",
    )
    if precision == "float32":
        bounds = "Relative bounds: loss {:g}, gradient {:g}, each parameter's gradient {:g}.".format(*EXACT)
        return f"{reference} {bounds}"
    loss, gradient, worst = (EPSILON[precision] * factor for factor in SLACK)
    return (
        f"{reference} Bounds: twice the error of plain transformers in {precision}, plus {loss:.1e} (loss), "
        f"{gradient:.1e} (gradient), {worst:.1e} (each parameter's gradient)."
    )


def precision_of(facts: Facts) -> str:
    """What matmuls round to: float32, tf32, bfloat16 or float16."""
    computed, precision = facts.compute_dtype, facts.techniques.precision
    return "tf32" if computed == "float32" and precision.enabled and precision.tf32 else computed


def loss_scale(builder: RunBuilder, supervised: int) -> LossScale:
    """A scale at which float16 keeps small gradients: about the number of supervised tokens. Training adapts its."""
    half = precision_of(builder.facts) == "float16"
    return LossScale(builder.world.device, 2.0 ** round(math.log2(supervised)) if half else 1.0, active=half)


class _Comparison:
    def __init__(self, builder: RunBuilder, plan: Plan, tell: Callable[[str], None]) -> None:
        self.builder, self.plan, self.tell, self.world = builder, plan, tell, builder.world
        self.supervised = plan.supervised(0)
        self.scale = loss_scale(builder, self.supervised)
        self.techniques = copy.deepcopy(builder.techniques)
        self.techniques.lora.dropout = 0.0
        if self.techniques.router.enabled:  # its loss is that of a micro-batch, so other splits have another one
            self.techniques.router.enabled = False
            tell("Without the auxiliary loss, which depends on the micro-batches: the evidence compares it.")
        self.hf_config = copy.deepcopy(builder.settled.hf_config)
        for config in (self.hf_config, self.hf_config.get_text_config()):
            for name, value in vars(config).items():
                if name.endswith(("dropout", "pdrop")) and isinstance(value, float):
                    setattr(config, name, 0.0)
        self.reference = _Result(0.0, {})
        self.bounds = EXACT

    def run(self, each: bool) -> Iterator[Compared]:
        precision, unbounded = precision_of(self.builder.facts), (math.inf,) * 3
        plain = self._plain()
        exact = replace(plain, precision=Precision(enabled=True, tf32=False), float8=Float8())
        name = "plain transformers, float32"
        self.reference = self._run_plain(exact, name, float32=True)
        yield self._compare(name, self.reference, unbounded)
        if precision != "float32":
            name = f"plain transformers, {precision}"
            rounded = self._compare(name, self._run_plain(plain, name), unbounded)
            yield rounded
            errors = (rounded.loss_off, rounded.gradient_off, rounded.worst_off)
            slack = [EPSILON[precision] * factor for factor in SLACK]
            self.bounds = tuple(2 * error + part for error, part in zip(errors, slack, strict=True))  # type: ignore[assignment]
        for name, pipeline in self._without(plain) if each else ():
            yield from self._run(pipeline, f"fxtune, without {name}", [self.plan.sizes.micro_batch_size])
        yield from self._run(self.techniques, "fxtune", self._splits())

    def _without(self, plain: Pipeline) -> Iterator[tuple[str, Pipeline]]:
        """(name, the techniques without it), for each technique that can be off and that the others do not need."""
        chosen = self.techniques
        if kept := [name for name in BY_DESIGN if getattr(chosen, name).enabled]:
            self.tell(
                f"Not switched off: {' and '.join(kept)}. They change the result by design; the reference has them."
            )
        for name in OPTIONAL:
            if not getattr(chosen, name).enabled or getattr(chosen, name) == getattr(plain, name):
                continue
            pipeline = replace(chosen, **{name: getattr(plain, name)})
            try:
                if name != "attention":  # the check of packing cannot know that its replacement isolates documents
                    pipeline.check(self.builder.facts)
            except ConfigError as error:
                self.tell(f"fxtune, without {name}: left out, because the others need it. {error}")
                continue
            yield name, pipeline

    def _plain(self) -> Pipeline:
        """The techniques of BY_DESIGN only. transformers chooses the attention itself."""
        off = copy.deepcopy(self.techniques)
        off.lora.fused = Switch.off
        for name in OPTIONAL:
            getattr(off, name).enabled = False
        if self.builder.facts.text.get("attn_logit_softcapping"):
            # All other attention kernels of transformers ignore the cap.
            off.attention = Attention(enabled=True, backend="eager")
        return off

    def _splits(self) -> list[int]:
        """Micro-batch sizes: the configured one, one row (or group), one in the middle, and all rows."""
        total, configured = self.plan.sizes.global_batch_size, self.plan.sizes.micro_batch_size
        least = self.plan.stream.rows_of_group
        divisors = [size for size in range(least, total + 1, least) if total % size == 0]
        middle = min(divisors, key=lambda size: abs(math.log(size) - math.log(total) / 2))
        return list(dict.fromkeys([configured, least, middle, total]))

    def _run_plain(self, pipeline: Pipeline, name: str, float32: bool = False) -> _Result:
        """Each document of the step alone. If its activations do not fit, with transformers' own checkpointing. Of
        several ranks, rank 0 does it and the others wait in _compare()."""
        if not self.world.main:
            return _Result(0.0, {})
        try:
            self.tell(f"{name} ...")
            return self._documents(pipeline, float32, checkpointed=False)
        except torch.OutOfMemoryError:
            pass
        try:
            self.tell(f"{name}, checkpointed by transformers ...")
            return self._documents(pipeline, float32, checkpointed=True)
        except torch.OutOfMemoryError as error:
            raise HardwareError(
                f"The reference does not fit: {str(error).partition('. See documentation')[0]}\nIt runs each "
                "document alone, with all its logits in float32. Use a shorter data.sequence_length, or "
                "model.architecture={num_hidden_layers: 4} with model.init=random."
            ) from error

    def _documents(self, pipeline: Pipeline, float32: bool, checkpointed: bool) -> _Result:
        device = self.builder.world.device
        loss = torch.zeros((), device=device, dtype=torch.float64)
        with self._built(pipeline, World(device)) as prepared:
            model = prepared.module
            as_peft(model)
            if float32:
                _to_float32(model)
            if checkpointed:
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
                model.enable_input_require_grads()
            for ids, targets in self._each_document():
                wanted = (targets != IGNORE_INDEX).nonzero().flatten()
                if not len(wanted):
                    continue
                end = int(wanted[-1]) + 1  # tokens after the last target, padding included, have no influence
                with pipeline.precision.context(device):
                    logits = model(input_ids=ids[None, :end], use_cache=False).logits[0]
                part = F.cross_entropy(logits[wanted].float(), targets[wanted], reduction="sum") / self.supervised
                self.scale.scaled(part).backward()
                loss += part.detach()
            self.scale.unscale([parameter for parameter in model.parameters() if parameter.requires_grad])
            return _collect(model, loss)

    def _each_document(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for batch in self._batches(self.plan.stream.rows_of_group):
            for ids, targets, positions in zip(batch.input_ids, batch.targets, batch.position_ids, strict=True):
                starts = [*(positions == 0).nonzero().flatten().tolist(), len(ids)]
                for begin, end in pairwise(starts):
                    yield ids[begin:end], targets[begin:end]

    def _run(self, pipeline: Pipeline, name: str, splits: list[int]) -> Iterator[Compared]:
        """The training step with the techniques of `pipeline`, once for each micro-batch size."""
        builder = copy.copy(self.builder)
        # On slow links reduce_dtype, powersgd_rank and average_every change the sum by design.
        parallel = builder.config.parallel
        parallel = ParallelConfig(parallel.replicate, parallel.shard, parallel.context)
        settled = builder.settled.using(pipeline)
        builder.settled = replace(settled, config=replace(settled.config, parallel=parallel))
        total, configured = self.plan.sizes.global_batch_size, self.plan.sizes.micro_batch_size
        ranks = f" on {self.world.size} ranks" if self.world.size > 1 else ""
        with self._built(pipeline, self.world) as prepared:
            model = prepared.module
            for size in splits:
                title = f"{name}{ranks}, {total // size} x {size}{' as configured' if size == configured else ''}"
                self.tell(f"{title} ...")
                try:
                    step = builder.train_step(builder.language_model(prepared), CausalLM(), self.scale, recorded=False)
                    own, batches = self._own_batches(size)
                    metrics = together(self.world, partial(step.backward, batches, self.supervised, own=own))
                    result = _collect(model, step.sum_over_ranks(metrics)["loss"])
                except (torch.OutOfMemoryError, MemoryShortError):
                    if size <= configured:
                        raise
                    self.tell(f"{title}: does not fit this GPU, left out")
                    model.zero_grad(set_to_none=True)
                    torch.cuda.empty_cache()
                else:
                    yield self._compare(title, result, self.bounds)

    @contextlib.contextmanager
    def _built(self, pipeline: Pipeline, world: World) -> Iterator[PreparedModel]:
        builder = self.builder
        _free_memory()  # again, because an error on its way holds the model that raised it
        built = pipeline.build(builder.config.model, self.hf_config, world, builder.config.run.seed)
        _fill_adapters(built.module.train())
        try:
            yield built
        finally:
            del built
            _free_memory()

    def _batches(self, size: int) -> Iterator[Batch]:
        plan = Plan(self.plan.stream, replace(self.plan.sizes, micro_batch_size=size))
        for micro in range(plan.micro_batches(0)):
            yield plan.batch(0, micro).to(self.builder.world.device)

    def _own_batches(self, size: int) -> tuple[int, Iterator[Batch]]:
        """How many micro-batches of this rank count, and the micro-batches."""
        plan = self.builder.own(self.plan.with_micro_batch_size(size))
        batches = (plan.batch(0, micro).to(self.world.device) for micro in range(plan.micro_batches(0)))
        return plan.own_micro_batches(0), batches

    def _compare(self, name: str, result: _Result, bounds: tuple[float, float, float]) -> Compared:
        """The comparison by rank 0, on every rank."""
        compared = self._compared(name, result, bounds) if self.world.main else None
        compared = self.world.broadcast(compared, "waiting for rank 0 to compare")
        assert compared is not None, "rank 0 has compared"
        return compared

    def _compared(self, name: str, result: _Result, bounds: tuple[float, float, float]) -> Compared:
        reference = self.reference.gradients
        if different := sorted(reference.keys() ^ result.gradients.keys()):
            worst = f"{different[0]} (trained in one of them only)"
            return Compared(name, result.loss, math.nan, math.inf, worst, math.inf, bounds)
        norms = {key: value.norm().item() for key, value in reference.items()}
        errors = {key: (result.gradients[key] - value).norm().item() for key, value in reference.items()}
        norm, error = math.hypot(*norms.values()), math.hypot(*errors.values())
        floor = MIN_NORM * norm / math.sqrt(len(norms))
        relative = {key: errors[key] / max(norms[key], floor) for key in errors}
        worst = max(relative, key=lambda key: (math.isnan(relative[key]), relative[key]))
        loss = abs(result.loss - self.reference.loss) / abs(self.reference.loss)
        return Compared(name, result.loss, loss, error / norm, worst, relative[worst], bounds)


def _collect(model: nn.Module, loss: torch.Tensor) -> _Result:
    """The loss and the gradients of the trained parameters. Removes the gradients from the parameters."""
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            if isinstance(gradient, DTensor):
                gradient = gradient.full_tensor()
            gradients[name] = gradient.float().cpu()
            parameter.grad = None
    return _Result(loss.item(), gradients)


def _fill_adapters(model: nn.Module) -> None:
    """Give each new adapter's B values that depend only on the parameter's name."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name and parameter.requires_grad and not parameter.any():
                draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                parameter.copy_(0.02 * torch.randn(parameter.shape, generator=draw))


def _to_float32(model: nn.Module) -> None:
    """Let the model compute in float32 with the same weights; quantized weights are dequantized."""
    from peft.utils import ModulesToSaveWrapper

    model.float()
    modules: Iterator[Any] = model.modules()
    for module in modules:
        if hasattr(module, "compute_dtype"):  # bitsandbytes' linears
            module.compute_dtype = torch.float32
            if (state := getattr(getattr(module, "weight", None), "quant_state", None)) is not None:
                state.dtype = torch.float32
        if isinstance(module, ModulesToSaveWrapper):
            # The lora technique casts the output of a float32 module to the dtype of the base.
            for trained in module.modules_to_save.values():
                remove_forward_hooks(trained)


def _free_memory() -> None:
    gc.collect()
    torch.compiler.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
