"""Checks the loss: runs the same global batch through the recipe's techniques and through plain transformers.

The reference is plain transformers (and peft). A forward pass has one document, and nothing is packed, fused,
recomputed or compiled. The objective computes its loss, group by group, from log-probabilities of float32 logits
(plain_model.py). Techniques that change the mathematics by design stay on in the reference: scaled RoPE, adapters, a
quantized base. Fp8 products of trained weights also stay on, but not in the float32 reference. Dropout and the noise
of routers are off everywhere, because with them two passes would never agree.

In float32 fxtune and the reference must agree to rounding. In bfloat16 and float16 the order of summation changes the
result. So plain transformers also runs in that precision: its error is due to rounding alone. The error of fxtune may
be twice that error, plus a fraction of the dtype's epsilon. Errors of groups may cancel in the loss by chance. So the
loss error of plain transformers counts as at least the root of the sum of the groups' squared errors.

An objective may amplify rounding: in float32, 0.1 x the difference of two sums of -1,000 nats is wrong by 1e-5. So
epsilon is multiplied by the objective's sensitivity: the change of the loss in epsilons, if each log-probability
changes by one epsilon. In float32 the changes from all log-probabilities are added up, because their sums are rounded.
In other precisions the errors of tokens are larger and independent, so the squares of the changes are added up.

The loss of a mixture's routers depends on the micro-batches. It is compared for the configured micro-batch size, and
off for other sizes.

The B of a new adapter is zero and would hide an error in its A, so each B gets fixed values here. If the objective has
a reference, all trained weights are changed, because at its start a model equals the reference. One model is in memory
at a time, and plain models run before models with fxtune's code. Several ranks run the step together as in training.
Rank 0 alone runs plain transformers and compares.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from fxtune.data.batches.batch import Batch, build_batch
from fxtune.data.batches.plan import Plan
from fxtune.diagnostics.plain_model import PlainModel, RouterCounts
from fxtune.distributed.parallel import ParallelConfig
from fxtune.distributed.world import World
from fxtune.errors import ConfigError, HardwareError, MemoryShortError
from fxtune.facts.options import RopeType, Switch
from fxtune.facts.run import Facts
from fxtune.models.prepared import PreparedModel
from fxtune.objectives.reference import Reference, WithReference
from fxtune.settle.settled import settle_frozen_model
from fxtune.techniques.assemble import assemble, assemble_frozen
from fxtune.techniques.attention.technique import Attention
from fxtune.techniques.float8 import Float8
from fxtune.techniques.pipeline import Pipeline
from fxtune.techniques.precision import LossScale, Precision
from fxtune.training.agreement import together
from fxtune.training.builder import RunBuilder
from fxtune.training.whole_step import step_parts

BY_DESIGN = ("rope", "precision", "quantize", "float8", "lora", "plugins")
"""Techniques that change the result, and so stay on in the reference. Other techniques must not change the result."""
OPTIONAL = tuple(entry.name for entry in dataclasses.fields(Pipeline) if entry.name not in BY_DESIGN)
EXACT = (1e-5, 1e-5, 1e-4)
"""Relative bounds in float32, for the loss, the full gradient, and the gradient of the worst parameter."""
SLACK = (1 / 8, 1 / 2, 1.0)
"""In other precisions a bound is twice the error of plain transformers, plus this number of the dtype's epsilons."""
SLACK_OF_GROUPS = (1 / 2, 1 / 2, 1.0)
"""SLACK for an objective over groups of documents. Its loss is a mean of a few terms; the loss of text is a mean of
hundreds. On an H100 in bfloat16 the loss of a few pairs was off by up to 2.1e-3 (DPO with a stored reference, reward
models)."""
MIN_NORM = 0.01
"""The error of a parameter's gradient is divided by the gradient's norm, or by this fraction of the mean norm if that
is larger. The gradient of a key's bias, for example, is zero except for rounding."""
MOST = 1000.0
"""The highest sensitivity of an objective."""
EPSILON = {"float32": 2.0**-23, "bfloat16": 2.0**-8, "float16": 2.0**-11, "tf32": 2.0**-11}


@dataclass(frozen=True)
class Compared:
    """One variant compared with the reference."""

    name: str
    loss: float
    """The objective's mean loss."""
    loss_off: float
    """|loss - reference| / reference"""
    gradient_off: float
    """|g - reference| / |reference|, with all trained parameters as one vector"""
    worst: str
    """The parameter whose gradient has the largest error."""
    worst_off: float
    bounds: tuple[float, float, float]
    """The largest allowed loss_off, gradient_off and worst_off."""

    @property
    def within(self) -> bool:
        return not self.beyond()

    def beyond(self) -> list[str]:
        """A text for each error that is out of its bound. NaN is out of every bound."""
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
    change: float = 0.0
    """The change of the loss in epsilons, if each log-probability changes by one epsilon."""
    shares: tuple[float, ...] = ()
    """Each group's share of the loss. Empty for fxtune: only plain transformers runs the groups one by one."""

    @property
    def size(self) -> float:
        """The number by which errors of the loss are divided. The loss itself may be 0 for preferences."""
        return max(abs(self.loss), self.change / MOST)

    @property
    def sensitivity(self) -> float:
        return max(1.0, _ratio(self.change, self.size))


def compare(builder: RunBuilder, plan: Plan, each: bool, tell: Callable[[str], None]) -> list[Compared]:
    """Compare the first step of `plan`, once for each split into micro-batches. `each`: also compare with each
    technique off in turn. `tell`: gets a line when a variant begins.

    Raises ConfigError if there is no reference, HardwareError if the reference does not fit.
    """
    if builder.techniques.rope.enabled and builder.techniques.rope.type is RopeType.dynamic:
        raise ConfigError(
            "techniques.rope.type=dynamic rotates a document's tokens by angles that depend on the whole row, so "
            "there is no reference, document by document. Use yarn or linear."
        )
    return list(_Comparison(builder, plan, tell).run(each))


def describe_bounds(builder: RunBuilder, compared: list[Compared]) -> str:
    """A line that names the reference and the bounds of `compared`, the result of compare()."""
    precision = precision_of(builder.facts)
    bounds = "loss {:.1e}, gradient {:.1e}, each parameter's gradient {:.1e}".format(*compared[-1].bounds)
    how = "" if precision == "float32" else f", from twice the error of plain transformers in {precision}"
    return f"Reference: plain transformers in float32, each document alone. Relative bounds: {bounds}{how}."


def precision_of(facts: Facts) -> str:
    """The precision that matrix products round to: float32, tf32, bfloat16 or float16."""
    computed, precision = facts.compute_dtype, facts.techniques.precision
    return "tf32" if computed == "float32" and precision.enabled and precision.tf32 else computed


def loss_scale(builder: RunBuilder, supervised: int) -> LossScale:
    """A loss scale at which float16 keeps small gradients: about the number of supervised tokens. In training the
    scale adapts instead."""
    half = precision_of(builder.facts) == "float16"
    return LossScale(builder.world.device, 2.0 ** round(math.log2(max(supervised, 1))) if half else 1.0, active=half)


class _Comparison:
    def __init__(self, builder: RunBuilder, plan: Plan, tell: Callable[[str], None]) -> None:
        self.builder, self.plan, self.tell, self.world = builder, plan, tell, builder.world
        self.objective = builder.config.objective
        self.normalizer = self.objective.normalizer(plan, 0)
        self.scale = loss_scale(builder, plan.supervised(0))
        self.techniques = copy.deepcopy(builder.techniques)
        self.techniques.lora.dropout = 0.0
        if self.techniques.router.enabled and self.world.context_ranks > 1:
            self.techniques.router.enabled = False
            tell("Without the routers' loss, which each rank has of its pieces of rows: the evidence compares it.")
        self.hf_config = copy.deepcopy(builder.hf_config)
        for config in (self.hf_config, self.hf_config.get_text_config()):
            for name, value in vars(config).items():
                if ("drop" in name or name.endswith("jitter_noise")) and isinstance(value, float):
                    setattr(config, name, 0.0)
        self.order = 1 if precision_of(builder.facts) == "float32" else 2
        """The order of the norm that adds up the errors of log-probabilities."""
        self.references: dict[bool, _Result] = {}
        """The reference without the routers' loss (False) and, if the techniques have it, with the routers' loss of
        the configured micro-batches (True)."""
        self.rounding: dict[bool, tuple[float, float, float]] = {}
        """The errors of plain transformers in the recipe's precision, with the same keys. Empty for float32."""

    def run(self, each: bool) -> Iterator[Compared]:
        precision, plain = precision_of(self.builder.facts), _plain(self.techniques, self.builder.facts)
        exact = replace(plain, precision=Precision(enabled=True, tf32=False), float8=Float8())
        self.references = self._run_plain(exact, "plain transformers, float32", float32=True)
        for balanced, result in self.references.items():
            yield self._compare("plain transformers, float32", result, balanced, bounded=False)
        if precision != "float32":
            name = f"plain transformers, {precision}"
            for balanced, result in self._run_plain(plain, name).items():
                rounded = self._compare(name, result, balanced, bounded=False)
                yield rounded
                reference = self.references[balanced]
                chance = _ratio(math.dist(reference.shares, result.shares), reference.size)
                self.rounding[balanced] = (max(rounded.loss_off, chance), rounded.gradient_off, rounded.worst_off)
        for name, pipeline in self._without(plain) if each else ():
            yield from self._run(pipeline, f"fxtune, without {name}", [self.plan.sizes.micro_batch_size])
        yield from self._run(self.techniques, "fxtune", self._splits())

    def _without(self, plain: Pipeline) -> Iterator[tuple[str, Pipeline]]:
        """Yield (name, the techniques without it) for each technique that can be off and that no other one needs."""
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

    def _splits(self) -> list[int]:
        """Micro-batch sizes: the configured one, one row (or group), one in the middle, and all rows."""
        total, configured = self.plan.sizes.global_batch_size, self.plan.sizes.micro_batch_size
        least = self.plan.stream.rows_of_group
        divisors = [size for size in range(least, total + 1, least) if total % size == 0]
        middle = min(divisors, key=lambda size: abs(math.log(size) - math.log(total) / 2))
        return list(dict.fromkeys([configured, least, middle, total]))

    def _run_plain(self, pipeline: Pipeline, name: str, float32: bool = False) -> dict[bool, _Result]:
        """Call _groups(); if activations do not fit, again with transformers' own checkpointing. Only rank 0 does so.
        Other ranks return empty results and wait in _compare()."""
        if not self.world.main:
            return {balanced: _Result(0.0, {}) for balanced in [False, True][: 1 + self.techniques.router.enabled]}
        try:
            self.tell(f"{name} ...")
            return self._groups(pipeline, float32, checkpointed=False)
        except torch.OutOfMemoryError:
            pass
        try:
            self.tell(f"{name}, checkpointed by transformers ...")
            return self._groups(pipeline, float32, checkpointed=True)
        except torch.OutOfMemoryError as error:
            raise HardwareError(
                f"The reference does not fit: {str(error).partition('. See documentation')[0]}\nIt runs each "
                "document alone, with all its logits in float32, and keeps what the backward pass of one group needs. "
                "Use a shorter data.sequence_length, or model.architecture={num_hidden_layers: 4} with "
                "model.init=random."
            ) from error

    def _groups(self, pipeline: Pipeline, float32: bool, checkpointed: bool) -> dict[bool, _Result]:
        """Run the step with plain transformers, group by group. Returns the result without the routers' loss (False)
        and, for a model that is trained with this loss, the result with it (True)."""
        device, balanced = self.builder.world.device, self.techniques.router.enabled
        total = torch.zeros((), device=device, dtype=torch.float64)
        change, shares = total.clone(), list[torch.Tensor]()
        with self._built(pipeline, World(device)) as prepared:
            plain = PlainModel(prepared, checkpointed, balanced, self.builder.facts.shares_prompts)
            dtypes = {name: parameter.dtype for name, parameter in plain.model.named_parameters()}
            if float32:
                plain.to_float32()
            self.objective.prepare(plain, partial(self._plain_frozen, float32))
            references, parts = list[torch.Tensor](), list[torch.Tensor]()
            if isinstance(self.objective, WithReference) and self.objective.reference is not Reference.base:
                # The reference is the model at the start of the run. Stored numbers are not used: they may be wrong.
                with torch.no_grad(), pipeline.precision.context(device):
                    references = [plain.log_probs(batch) for _, batch in self._group_batches()]
            _move_weights(plain.model, self.objective.needs.reference, dtypes)

            def batches() -> Iterator[tuple[int, Batch]]:
                for position, (micro, batch) in enumerate(self._group_batches()):
                    reference = references[position] if references else None
                    part = parts[position] if parts else None
                    yield micro, replace(batch, step_part=part, reference=reference)

            def backward(loss: torch.Tensor) -> None:
                self.scale.scaled(loss).backward()
                total.add_(loss.detach())

            def collected() -> _Result:
                self.scale.unscale([parameter for parameter in plain.model.parameters() if parameter.requires_grad])
                return replace(
                    _collect(plain.model, total),
                    change=change.item() ** (1 / self.order),
                    shares=tuple(torch.stack(shares).tolist()),
                )

            counts: dict[int, RouterCounts] = {}
            """The routers' counts of each micro-batch."""
            if self.objective.needs.whole_step:
                with torch.no_grad(), pipeline.precision.context(device):
                    values = [self.objective.step_values(plain, batch) for _, batch in batches()]
                parts = step_parts(self.objective, values, World(device))
            for micro, batch in batches():
                with pipeline.precision.context(device):
                    loss = self.objective.loss(plain, batch)[0] / self.normalizer
                backward(loss)
                shares.append(loss.detach())
                change += plain.take_change(self.order) / self.scale.scale**self.order
                if plain.counts is not None:
                    counts.setdefault(micro, RouterCounts(len(plain.counts.chosen), device)).add(plain.counts)
            results = {False: collected()}
            if balanced:
                coefficient = self.techniques.router.aux_loss_coef or 0.0
                for micro, batch in self._group_batches():
                    with pipeline.precision.context(device):
                        loss = plain.router_loss(batch, counts[micro])
                    backward(coefficient * counts[micro].weight / self.normalizer * loss)
                results[True] = collected()
                for name, gradient in results[True].gradients.items():
                    gradient += results[False].gradients[name]
        return results

    def _plain_frozen(self, float32: bool) -> PlainModel:
        """The frozen model of the objective, computed by plain transformers."""
        builder = self.builder
        settled = settle_frozen_model(builder.config, builder.facts)
        assert settled is not None, "the objective has a frozen model"
        techniques, world = _plain(settled.techniques, settled.facts), World(builder.world.device)
        model, seed = settled.config.model, builder.config.run.seed
        plain = PlainModel(assemble_frozen(techniques, model, settled.hf_config, world, seed))
        if float32:
            plain.to_float32()
        return plain

    def _group_batches(self) -> Iterator[tuple[int, Batch]]:
        """Yield (number of the group's micro-batch at the configured size, a batch) for each group of the step. The
        batch is one row with the group's documents, without padding."""
        for micro in range(self.plan.micro_batches(0)):
            spec = self.plan.batch_spec(0, micro).whole()
            group_of = np.arange(len(spec.length)) if spec.group is None else spec.group
            for group in range(group_of.max() + 1):
                of = group_of == group
                documents = int(of.sum())
                batch = replace(
                    spec,
                    source=spec.source[of],
                    start=spec.start[of],
                    length=spec.length[of],
                    offsets=np.array([0, documents]),
                    width=int(spec.length[of].sum()),
                    packed=True,
                    slots=documents,
                    group=None if spec.group is None else np.zeros(documents, np.int64),
                    label=None if spec.label is None else spec.label[of],
                )
                yield micro, build_batch(self.plan.tables, batch).to(self.world.device)

    def _run(self, pipeline: Pipeline, name: str, splits: list[int]) -> Iterator[Compared]:
        """Take the training step with the techniques of `pipeline`. Yields a comparison for each micro-batch size."""
        builder = copy.copy(self.builder)
        # Compression and average_every are for slow links. They change the sum over ranks by design, so they are off.
        parallel = builder.config.parallel
        parallel = ParallelConfig(parallel.replicate, parallel.shard, parallel.context)
        builder.stage = builder.stage.with_techniques(pipeline).decided((), parallel=parallel)
        total, configured = self.plan.sizes.global_batch_size, self.plan.sizes.micro_batch_size
        ranks = f" on {self.world.size} ranks" if self.world.size > 1 else ""
        with self._built(pipeline, self.world) as prepared:
            model = prepared.module.train()
            for router in prepared.routers.modules if prepared.routers else ():
                router.eval()  # Phi-MoE's router draws experts at random in training mode
            language_model = builder.language_model(prepared)
            _move_weights(model, self.objective.needs.reference)
            for size in splits:
                title = f"{name}{ranks}, {total // size} x {size}{' as configured' if size == configured else ''}"
                self.tell(f"{title} ...")
                balanced = pipeline.router.enabled and size == configured
                if prepared.routers is not None and not balanced:
                    prepared.routers.coefficient = 0.0
                try:
                    step = builder.train_step(language_model, self.objective, self.scale, recorded=False)
                    plan = builder.own(self.plan.with_micro_batch_size(size))
                    # This rank's micro-batches as a loader gives them to a GPU.
                    rounded = (plan.batch(0, micro).with_rounded_targets() for micro in range(plan.micro_batches(0)))
                    batches = (batch.to(self.world.device) for batch in rounded)
                    counted = plan.counted_micro_batches(0)
                    metrics = together(self.world, partial(step.backward, batches, self.normalizer, counted=counted))
                    result = _collect(model, step.sum_over_ranks(metrics)["loss"])
                except (torch.OutOfMemoryError, MemoryShortError):
                    if size <= configured:
                        raise
                    self.tell(f"{title}: does not fit this GPU, left out")
                    model.zero_grad(set_to_none=True)
                    torch.cuda.empty_cache()
                else:
                    yield self._compare(title, result, balanced)

    @contextlib.contextmanager
    def _built(self, pipeline: Pipeline, world: World) -> Iterator[PreparedModel]:
        builder = self.builder
        _free_memory()  # again, because an exception that is being handled holds the model that raised it
        trains_images = builder.config.optimizer.lr_vision is not None
        built = assemble(
            pipeline, builder.config.model, self.hf_config, world, builder.config.run.seed, trains_images=trains_images
        )
        try:
            yield built
        finally:
            del built
            _free_memory()

    def _compare(self, name: str, result: _Result, balanced: bool, bounded: bool = True) -> Compared:
        """Compare on rank 0, and return the result on every rank. `balanced`: `result` has the routers' loss."""
        name += ", with the routers' loss" * balanced
        compared = partial(self._compared, name, result, balanced, bounded)
        return self.world.from_main(compared, "waiting for rank 0 to compare")

    def _compared(self, name: str, result: _Result, balanced: bool, bounded: bool) -> Compared:
        bounds, reference = self._bounds(balanced) if bounded else (math.inf,) * 3, self.references[balanced]
        if different := sorted(reference.gradients.keys() ^ result.gradients.keys()):
            worst = f"{different[0]} (trained in one of them only)"
            return Compared(name, result.loss, math.nan, math.inf, worst, math.inf, bounds)
        norms = {key: value.norm().item() for key, value in reference.gradients.items()}
        errors = {key: (result.gradients[key] - value).norm().item() for key, value in reference.gradients.items()}
        norm, error = math.hypot(*norms.values()), math.hypot(*errors.values())
        floor = MIN_NORM * norm / math.sqrt(len(norms))
        relative = {key: _ratio(errors[key], max(norms[key], floor)) for key in errors}
        worst = max(relative, key=lambda key: (math.isnan(relative[key]), relative[key]))
        loss = _ratio(abs(result.loss - reference.loss), reference.size)
        return Compared(name, result.loss, loss, _ratio(error, norm), worst, relative[worst], bounds)

    def _bounds(self, balanced: bool) -> tuple[float, float, float]:
        precision, sensitivity = precision_of(self.builder.facts), self.references[balanced].sensitivity
        rounding = EPSILON[precision] * sensitivity
        if precision == "float32":
            loss, gradient, worst = (bound + rounding for bound in EXACT)
        else:
            slack = SLACK_OF_GROUPS if self.objective.needs.reads_groups else SLACK
            errors = zip(self.rounding[balanced], slack, strict=True)
            loss, gradient, worst = (2 * error + rounding * factor for error, factor in errors)
        return loss, gradient, worst


def _plain(techniques: Pipeline, facts: Facts) -> Pipeline:
    """The techniques of BY_DESIGN only. The library transformers chooses the attention kernel itself."""
    off = copy.deepcopy(techniques)
    off.lora.fused = Switch.off
    for name in OPTIONAL:
        getattr(off, name).enabled = False
    if facts.text.get("attn_logit_softcapping"):
        # All other attention kernels of transformers ignore the cap.
        off.attention = Attention(enabled=True, backend="eager")
    return off


def _ratio(error: float, size: float) -> float:
    """`error` divided by `size`. `size` may be 0, because an objective may have a loss or a gradient of 0."""
    return error / size if size else math.inf if error else 0.0


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


def _move_weights(model: nn.Module, from_reference: bool, dtypes: Mapping[str, torch.dtype] | None = None) -> None:
    """Give each new adapter's B values that depend only on the parameter's name. `from_reference`: also change the
    other trained weights by about 2 %, so that the model differs from the model at the start of the run. `dtypes`: the
    dtypes to which new values are rounded; None: the parameters' own dtypes."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_new = "lora_" in name and not parameter.any()
            if not parameter.requires_grad or not (is_new or from_reference):
                continue
            draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            value = parameter.to(dtypes[name] if dtypes else parameter.dtype)
            change = (0.02 * torch.randn(parameter.shape, generator=draw)).to(value)
            if isinstance(value, DTensor):
                change = distribute_tensor(change, value.device_mesh, value.placements)
            parameter.copy_(change if is_new else value * (1 + change))


def _free_memory() -> None:
    gc.collect()
    torch.compiler.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
