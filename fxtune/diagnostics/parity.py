"""Is my loss right? The same global batch through the techniques and through plain transformers, side by side.

The reference is what nobody can argue with: plain transformers (and peft), one document a forward pass, nothing packed,
nothing fused, nothing recomputed, nothing compiled, cross-entropy of float32 logits. What changes the mathematics by design
stays on in it: scaled RoPE, adapters, a quantised base. Dropout is off in all of them: it cannot be the same twice.

In float32 the two must agree to rounding. In bfloat16 and float16 no two orders of summation agree, so plain transformers in
that precision says how far from float32 rounding alone leads: fxtune may be twice as far, plus a part of the dtype's epsilon.

A new adapter's B is zero, which would hide its A; each gets fixed values here. One model is in memory at a time, and the plain
ones come first, before anything of fxtune's own runs on the batch.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fxtune.data.batches.batch import IGNORE_INDEX, Batch
from fxtune.data.batches.plan import Plan
from fxtune.errors import ConfigError, HardwareError
from fxtune.objectives.causal_lm import CausalLM
from fxtune.techniques.attention.technique import Attention
from fxtune.techniques.base import Switch
from fxtune.techniques.pipeline import Pipeline
from fxtune.techniques.precision import LossScale, Precision
from fxtune.techniques.rope import RopeType
from fxtune.training.builder import RunBuilder

BY_DESIGN = ("rope", "precision", "quantize", "lora")
"""Techniques that change what is computed, and so stay on in the reference. All others must not."""
OPTIONAL = tuple(entry.name for entry in dataclasses.fields(Pipeline) if entry.name not in BY_DESIGN)
EXACT = (1e-5, 1e-5, 1e-4)
"""Relative bounds in float32: the loss, the whole gradient, the worst parameter's gradient."""
SLACK = (1 / 8, 1 / 2, 1.0)
"""In other precisions: so many epsilons of the dtype beyond twice what plain transformers is off by."""
QUIET = 0.01
"""A parameter's gradient is compared with its own norm, or with this part of the mean norm of all where that is more: the
gradient of a key's bias, for one, is zero but for rounding."""
_EPSILON = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "tf32": 2.0**-11}


@dataclass(frozen=True)
class Compared:
    """One variant beside the reference."""

    name: str
    loss: float
    """nats a supervised token"""
    loss_off: float
    """|loss - reference| / reference"""
    gradient_off: float
    """|g - reference| / |reference|, over all trained parameters as one vector"""
    worst: str
    """The parameter whose own gradient is off the most."""
    worst_off: float
    bounds: tuple[float, float, float]
    """For loss, gradient and worst parameter."""

    @property
    def within(self) -> bool:
        return not self.beyond()

    def beyond(self) -> list[str]:
        """What is outside its bound, in words. NaN is outside of all bounds."""
        offs = (
            ("loss", self.loss_off),
            ("gradient", self.gradient_off),
            (f"gradient of {self.worst}", self.worst_off),
        )
        return [
            f"{what} off by {off:.1e} (at most {bound:.1e})"
            for (what, off), bound in zip(offs, self.bounds, strict=True)
            if not off <= bound
        ]


@dataclass
class _Result:
    loss: float
    gradients: dict[str, torch.Tensor]
    """float32, on the host"""


def compare(setting: RunBuilder, plan: Plan, each: bool, tell: Callable[[str], None]) -> list[Compared]:
    """The first step of `plan`: reference, variants, each micro-batch split, and with `each` each technique off in turn.

    `tell` gets a line a variant when it begins. Raises ConfigError where no reference can be had, HardwareError where it does
    not fit.
    """
    if setting.techniques.rope.enabled and setting.techniques.rope.type is RopeType.dynamic:
        raise ConfigError(
            "techniques.rope.type=dynamic turns a document's tokens by angles that depend on the row around it, so "
            "there is no loss to compare with, document by document. Use yarn or linear."
        )
    return list(_Comparison(setting, plan, tell).rows(each))


def explained(setting: RunBuilder) -> str:
    """The tolerances in a sentence."""
    if precision_of(setting) == "float32":
        loss, gradient, worst = EXACT
        return (
            f"Reference: plain transformers in float32, each document alone. Within: loss {loss:g} and gradient {gradient:g} "
            f"relative, each parameter's gradient {worst:g}."
        )
    loss, gradient, worst = (_EPSILON[precision_of(setting)] * part for part in SLACK)
    return (
        f"Reference: plain transformers in float32, each document alone. Within: at most twice as far from it as plain "
        f"transformers in {precision_of(setting)} is, plus {loss:.1e} (loss), {gradient:.1e} (gradient), {worst:.1e} (a "
        "parameter's gradient)."
    )


def precision_of(setting: RunBuilder) -> str:
    """What matmuls round to: float32, tf32, bfloat16 or float16."""
    computed = setting.facts.compute_dtype
    precision = setting.techniques.precision
    return "tf32" if computed == "float32" and precision.enabled and precision.tf32 else computed


def loss_scale(setting: RunBuilder, supervised: int) -> LossScale:
    """A scale at which float16 loses no small gradient: that of the sum over tokens. The trainer finds its own as it goes."""
    half = precision_of(setting) == "float16"
    return LossScale(setting.world.device, 2.0 ** round(math.log2(supervised)) if half else 1.0, active=half)


class _Comparison:
    def __init__(self, setting: RunBuilder, plan: Plan, tell: Callable[[str], None]) -> None:
        self.setting, self.plan, self.tell = setting, plan, tell
        self.supervised = plan.supervised(0)
        self.scale = loss_scale(setting, self.supervised)
        self.techniques = copy.deepcopy(setting.techniques)
        self.techniques.lora.dropout = 0.0
        self.hf_config = copy.deepcopy(setting.hf_config)
        for config in (self.hf_config, self.hf_config.get_text_config()):
            for name, value in vars(config).items():
                if name.endswith(("dropout", "pdrop")) and isinstance(value, float):
                    setattr(config, name, 0.0)
        self.truth = _Result(0.0, {})
        self.bounds = EXACT

    def rows(self, each: bool) -> Iterator[Compared]:
        precision = precision_of(self.setting)
        plain = self._plain()
        self.truth = self._reference(
            replace(plain, precision=Precision(enabled=True, tf32=False)), "plain transformers, float32", exact=True
        )
        yield self._compared("plain transformers, float32", self.truth, (math.inf,) * 3)
        if precision != "float32":
            rounded = self._compared(
                f"plain transformers, {precision}",
                self._reference(plain, f"plain transformers, {precision}"),
                (math.inf,) * 3,
            )
            yield rounded
            slack = [_EPSILON[precision] * part for part in SLACK]
            offs = rounded.loss_off, rounded.gradient_off, rounded.worst_off
            self.bounds = tuple(2 * off + part for off, part in zip(offs, slack, strict=True))  # type: ignore[assignment]
        chosen = self.techniques
        if each and (kept := [name for name in BY_DESIGN if getattr(chosen, name).enabled]):
            self.tell(
                f"Not taken away: {' and '.join(kept)}. What is computed is another by design, and the reference has "
                f"{'it' if len(kept) == 1 else 'them'}, too."
            )
        without = {
            name: replace(chosen, **{name: getattr(plain, name)})
            for name in OPTIONAL
            if each and getattr(chosen, name).enabled and getattr(chosen, name) != getattr(plain, name)
        }
        for name, pipeline in without.items():
            try:
                if (
                    name != "attention"
                ):  # what takes its place isolates documents, which the check of packing cannot know
                    pipeline.check(self.setting.facts)
            except ConfigError as error:
                self.tell(f"fxtune, without {name}: left out, the others need it. {error}")
                continue
            yield from self._ours(pipeline, f"fxtune, without {name}", [self.plan.sizes.micro_batch_size])
        yield from self._ours(chosen, "fxtune", self._splits())

    def _plain(self) -> Pipeline:
        """The techniques less those that must not change what is computed: attention is transformers' own choice."""
        off = copy.deepcopy(self.techniques)
        off.lora.fused = Switch.off
        for name in OPTIONAL:
            getattr(off, name).enabled = False
        if self.setting.facts.text.get("attn_logit_softcapping"):
            off.attention = Attention(
                enabled=True, backend="eager"
            )  # all other kernels of transformers leave the cap out
        return off

    def _splits(self) -> list[int]:
        """Micro-batch sizes to try: the configured one first, then one row, all rows, and what lies between."""
        whole, mine = self.plan.sizes.global_batch_size, self.plan.sizes.micro_batch_size
        fits = [size for size in range(1, whole + 1) if whole % size == 0]
        middle = min(fits, key=lambda size: abs(math.log(size) - math.log(whole) / 2))
        return list(dict.fromkeys([mine, 1, middle, whole]))

    def _reference(self, pipeline: Pipeline, name: str, exact: bool = False) -> _Result:
        """Each document of the step alone. Where its activations do not fit, transformers' own checkpointing is used."""
        for sparing in (False, True):
            self.tell(f"{name}{', checkpointed by transformers' if sparing else ''} ...")
            model = self._build(pipeline)
            if exact:
                _to_float32(model)
            if sparing:
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
                model.enable_input_require_grads()
            try:
                loss = self._documents(model, pipeline)
                self.scale.unscale([parameter for parameter in model.parameters() if parameter.requires_grad])
                return self._result(model, loss)
            except torch.OutOfMemoryError as error:
                if sparing:
                    raise HardwareError(
                        f"The reference does not fit: {str(error).partition('. See documentation')[0]}\nIt takes each document "
                        "alone with all its logits in float32. For the comparison use a shorter data.sequence_length or "
                        "model.architecture={num_hidden_layers: 4} with model.init=random."
                    ) from error
            finally:
                del model
                _forget()
        raise AssertionError("the second time returns or raises")

    def _documents(self, model: Any, pipeline: Pipeline) -> torch.Tensor:
        device = self.setting.world.device
        loss = torch.zeros((), device=device, dtype=torch.float64)
        for batch in self._batches(1):
            ids, targets = batch.input_ids[0], batch.targets[0]
            starts = [*(batch.position_ids[0] == 0).nonzero().flatten().tolist(), len(ids)]
            for begin, end in pairwise(starts):
                wanted = (targets[begin:end] != IGNORE_INDEX).nonzero().flatten()
                if not len(wanted):
                    continue
                end = begin + int(wanted[-1]) + 1  # what follows the last target, padding too, has no say in it
                with pipeline.precision.context(device):
                    logits = model(input_ids=ids[None, begin:end], use_cache=False).logits[0]
                kept = logits[wanted].float()
                part = F.cross_entropy(kept, targets[begin:end][wanted], reduction="sum") / self.supervised
                self.scale.scaled(part).backward()
                loss += part.detach()
        return loss

    def _ours(self, pipeline: Pipeline, name: str, splits: list[int]) -> Iterator[Compared]:
        model = self._build(pipeline)
        setting = copy.copy(self.setting)
        setting.techniques = pipeline
        whole = self.plan.sizes.global_batch_size
        try:
            for size in splits:
                title = f"{name}, {whole // size} x {size}{' as configured' if size == self.plan.sizes.micro_batch_size else ''}"
                self.tell(f"{title} ...")
                try:
                    yield self._compared(title, self._step(setting, model, size), self.bounds)
                except torch.OutOfMemoryError:
                    if size <= self.plan.sizes.micro_batch_size:
                        raise
                    self.tell(f"{title}: does not fit this card, left out")
                    model.zero_grad(set_to_none=True)
                    torch.cuda.empty_cache()
        finally:
            del model
            _forget()

    def _step(self, setting: RunBuilder, model: nn.Module, size: int) -> _Result:
        """The training step's loss and gradients, in micro-batches of `size` rows."""
        train_step = setting.train_step(setting.language_model(model), CausalLM(), self.scale, recorded=False)
        loss = train_step.backward(self._batches(size), self.supervised)["loss"]
        return self._result(model, loss)

    def _build(self, pipeline: Pipeline) -> Any:
        setting = self.setting
        model: Any = pipeline.build(setting.config.model, self.hf_config, setting.world, setting.config.run.seed)
        _fill(model)
        return model.train()

    def _batches(self, size: int) -> Iterator[Batch]:
        plan = Plan(self.plan.stream, replace(self.plan.sizes, micro_batch_size=size))
        for micro in range(plan.micro_batches(0)):
            yield plan.batch(0, micro).to(self.setting.world.device)

    def _result(self, model: nn.Module, loss: torch.Tensor) -> _Result:
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        gradients = {}
        for name, parameter in trained.items():
            gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            gradients[name] = gradient.float().cpu()
            parameter.grad = None
        return _Result(loss.item(), gradients)

    def _compared(self, name: str, result: _Result, bounds: tuple[float, float, float]) -> Compared:
        reference = self.truth.gradients
        if unlike := sorted(reference.keys() ^ result.gradients.keys()):
            return Compared(
                name, result.loss, math.nan, math.inf, f"{unlike[0]} (trained in one of them only)", math.inf, bounds
            )
        off = {name: (result.gradients[name] - value).norm().item() for name, value in reference.items()}
        norms = {name: value.norm().item() for name, value in reference.items()}
        whole = math.sqrt(sum(norm**2 for norm in norms.values()))
        floor = QUIET * whole / math.sqrt(len(norms))
        relative = {name: off[name] / max(norms[name], floor) for name in off}
        worst = max(relative, key=lambda name: (math.isnan(relative[name]), relative[name]))
        return Compared(
            name,
            result.loss,
            abs(result.loss - self.truth.loss) / abs(self.truth.loss),
            math.sqrt(sum(value**2 for value in off.values())) / whole,
            worst,
            relative[worst],
            bounds,
        )


def _fill(model: nn.Module) -> None:
    """Give the zero half of each new adapter fixed values: what they are depends on the parameter's name alone."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name and parameter.requires_grad and not parameter.any():
                draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                parameter.copy_(0.02 * torch.randn(parameter.shape, generator=draw))


def _to_float32(model: nn.Module) -> None:
    """Compute in float32 with the very weights that are there, quantised ones as what they stand for."""
    from peft.utils import ModulesToSaveWrapper

    model.float()
    modules: Iterator[Any] = model.modules()
    for module in modules:
        if hasattr(module, "compute_dtype"):  # bitsandbytes' linears
            module.compute_dtype = torch.float32
            if (state := getattr(module.weight, "quant_state", None)) is not None:
                state.dtype = torch.float32
        if isinstance(
            module, ModulesToSaveWrapper
        ):  # lora.py casts the output of what it trains in float32 over another dtype
            for trained in module.modules_to_save.values():
                trained._forward_hooks.clear()


def _forget() -> None:
    gc.collect()
    torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
