"""The techniques and the order in which they apply. This dataclass is the recipe's `techniques` group.

A decision that concerns two techniques is made here, so that neither of them has to predict the other.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from fxtune.distributed.world import World
from fxtune.errors import ConfigError
from fxtune.models import load as models
from fxtune.models.load import ModelConfig
from fxtune.models.structure import skeleton
from fxtune.system.units import GIB
from fxtune.techniques.apex import Apex
from fxtune.techniques.attention.inputs import model_inputs
from fxtune.techniques.attention.technique import Attention
from fxtune.techniques.base import Evidence, Switch, Technique
from fxtune.techniques.checkpointing.plan import RecomputePlan
from fxtune.techniques.checkpointing.technique import Checkpointing
from fxtune.techniques.compile.technique import Compile
from fxtune.techniques.estimate.memory import Need, forecast
from fxtune.techniques.liger.technique import Liger
from fxtune.techniques.lora.fuse import fuses_mlps
from fxtune.techniques.lora.technique import Lora
from fxtune.techniques.precision import Precision
from fxtune.techniques.quantize import Quantize
from fxtune.techniques.rope import Rope, own_scaling

if TYPE_CHECKING:
    from fxtune.techniques.facts import Facts

FAR = 2
"""A step on a CPU is refused if it needs more than this many times the host's memory: no forecast is that wrong."""


@dataclass
class Pipeline:
    # Before the model exists: its constructor computes inv_freq.
    rope: Rope = field(default_factory=Rope)
    # Before the model exists: layers choose their kernel in their constructors.
    attention: Attention = field(default_factory=Attention)
    # First on the built model: sets how the products of all later steps round.
    precision: Precision = field(default_factory=Precision)
    # Replaces modules of the base. Adapters wrap what it leaves, never the reverse.
    liger: Liger = field(default_factory=Liger)
    # The same modules as Liger. The two exclude each other.
    apex: Apex = field(default_factory=Apex)
    # Replaces the frozen linears, before adapters wrap them.
    quantize: Quantize = field(default_factory=Quantize)
    # Wraps the base's linears, so every change of the base comes first.
    lora: Lora = field(default_factory=Lora)
    # Wraps whole layers, adapters included.
    checkpointing: Checkpointing = field(default_factory=Checkpointing)
    # Last: traces the final layers.
    compile: Compile = field(default_factory=Compile)

    def enabled(self) -> Iterator[tuple[str, Technique]]:
        """The enabled techniques by name, in order of application."""
        for entry in dataclasses.fields(self):
            technique = getattr(self, entry.name)
            if technique.enabled:
                yield entry.name, technique

    def options(self) -> dict[str, dict[str, Any]]:
        """The options of the enabled techniques, by name."""
        return {name: dataclasses.asdict(technique) for name, technique in self.enabled()}

    def ignored_options(self) -> list[str]:
        """A line for each disabled technique with options that are set: probably `enabled=true` was forgotten."""
        notes = []
        for entry in dataclasses.fields(self):
            technique = getattr(self, entry.name)
            given, default = dataclasses.asdict(technique), dataclasses.asdict(type(technique)())
            changed = ", ".join(
                f"{key}={getattr(value, 'value', value)}"
                for key, value in given.items()
                if key != "enabled" and value != default[key]
            )
            if changed and not technique.enabled:
                notes.append(
                    f"{entry.name}: off, so {changed} has no effect. To use it: techniques.{entry.name}.enabled=true"
                )
        return notes

    def resolved(self, facts: Facts, problems: Sequence[str] = (), measure: bool = True) -> tuple[Pipeline, list[str]]:
        """A copy in which each `auto` is decided for `facts`, and the decisions with their reasons. Raises as check()
        does.

        `problems`: see check(). `measure`: see decided().
        """
        self.check(facts, problems)
        chosen, notes = self.decided(facts, measure)
        chosen.check(facts)
        if not self.rope.enabled and (scaling := own_scaling(facts.text)):
            notes.append(f"rope: the model's own scaling, {scaling}")
        return chosen, notes

    def decided(self, facts: Facts, measure: bool = True) -> tuple[Pipeline, list[str]]:
        """resolved() without any check.

        `measure`: whether the GPU may time Liger's kernels under torch.compile. If it may not, they count as off.
        """
        chosen, notes = copy.deepcopy(self), []
        facts = replace(facts, techniques=chosen)
        for name, technique in chosen.enabled():
            timed = technique is chosen.liger and chosen.compile.enabled
            if why := technique.resolve(replace(facts, device="cpu") if timed and not measure else facts):
                notes.append(f"{name}: {why}")
        return chosen, notes

    def mlp_kernel(self, facts: Facts) -> Literal["lora", "liger", ""]:
        """Which technique runs the gated MLPs of a model where fused LoRA can; empty: fused LoRA cannot, or it is off.

        Fused LoRA runs an MLP as one operator, and Liger replaces the product inside it, so only one of them can act.
        `auto` prefers fused LoRA, unless a Liger kernel for the product is `on`.
        """
        if not fuses_mlps(facts, skeleton(facts.model)):
            return ""
        demanded = self.liger.enabled and Switch.on in (self.liger.swiglu, self.liger.geglu)
        return "liger" if demanded and self.lora.fused is Switch.auto else "lora"

    def check(self, facts: Facts, problems: Sequence[str] = ()) -> None:
        """Raise one ConfigError with every reason why these techniques cannot run under `facts`, each with its key.

        `problems`: other reasons, added at the end.
        """
        facts = replace(facts, techniques=self)
        reasons = [
            f"techniques.{name}.{reason}" for name, technique in self.enabled() for reason in technique.check(facts)
        ]
        reasons += [*self._missing(facts), *self._too_large(facts), *problems]
        if reasons:
            raise ConfigError("This cannot run here as asked:\n" + "\n".join(f"  {reason}" for reason in reasons))

    def _missing(self, facts: Facts) -> Iterator[str]:
        """A reason for each disabled technique that this run needs."""
        if facts.packing and not self.attention.enabled:
            yield (
                "techniques.attention.enabled: false, but data.packing=true needs its proof that documents do not "
                "see each other. Set it to true."
            )
        if facts.dtype == "float16" and not self.lora.enabled:
            yield (
                "techniques.lora.enabled: false, but float16 weights cannot be trained (small updates underflow). "
                "Set it to true, or model.dtype to bfloat16 or float32."
            )
        positions = facts.text.get("max_position_embeddings")
        if positions and facts.sequence_length > positions and not self.rope.enabled:
            yield (
                f"techniques.rope.enabled: false, but data.sequence_length={facts.sequence_length} is beyond the "
                f"{positions} positions that the model was trained on. Shorten the rows, or scale its RoPE."
            )

    def memory_need(self, facts: Facts) -> Need:
        """The bytes that a training step needs under `facts` with these techniques; see estimate/memory.py."""
        plan = self.checkpointing.plan() if self.checkpointing.enabled else RecomputePlan()
        return forecast(replace(facts, techniques=self), plan)

    def _too_large(self, facts: Facts) -> Iterator[str]:
        """Reasons why a run cannot fit into a host's memory. A GPU reports that at once; a host swaps, or kills the
        process late."""
        if facts.device != "cpu" or not facts.memory:
            return
        need = self.memory_need(facts)
        fixed = need.weights + need.trained
        least = fixed + need.kept + need.layer  # without the loss: whether it is fused may still be `auto`
        here = f"and this machine has {facts.memory / GIB:.1f} GiB"
        changes = []
        if fixed > facts.memory:
            if not self.lora.enabled:
                changes.append("techniques.lora.enabled=true")
            elif not self.quantize.enabled:
                changes.append("techniques.quantize.enabled=true")
            if facts.dtype == "float32":
                changes.append("model.dtype=bfloat16")
            yield (
                f"model.path: its weights in {facts.dtype}, gradients and the optimizer's moments take "
                f"{fixed / GIB:.1f} GiB, {here}. Use {', '.join([*changes, 'a smaller model'])}, or a GPU."
            )
        elif least > FAR * facts.memory:
            if not self.checkpointing.enabled:
                changes.append("techniques.checkpointing.enabled=true")
            if facts.micro_batch_size > 1:
                changes.append("train.micro_batch_size=1")
            yield (
                f"data.sequence_length: a step of {facts.micro_batch_size} x {facts.row_length} tokens needs some "
                f"{least / GIB:.0f} GiB, {here}. Use {', '.join([*changes, 'shorter rows'])}, or a GPU."
            )

    def build(self, model: ModelConfig, hf_config: Any, world: World, seed: int) -> nn.Module:
        """Configure and build the model and apply the techniques, in order. Call it on a resolved pipeline.

        `hf_config` comes from load_config() and is not changed. Adapters are drawn from `seed`.
        """
        if model.adapter and not self.lora.enabled:
            raise ConfigError(
                f"model.adapter={model.adapter}, but techniques.lora.enabled=false. Set it to true, or remove the "
                "adapter."
            )
        hf_config = copy.deepcopy(hf_config)
        for _, technique in self.enabled():
            technique.configure(hf_config)
        built: nn.Module = models.build(model, hf_config, world, seed, shrinks=self.quantize.enabled)
        with torch.random.fork_rng(devices=[world.device] if world.device.type == "cuda" else []):
            torch.manual_seed(seed)
            for _, technique in self.enabled():
                # As in verify(): adapters are compared with the base under training's autocast both times.
                with self.precision.context(world.device):
                    built = technique.apply(built, world)
                if technique is self.lora and model.adapter:
                    self.lora.start_from(built, model.adapter)
        return built

    def verify(self, model: nn.Module, probe: dict[str, Any]) -> list[Evidence]:
        """Observe every enabled technique on the built model, under the autocast that training has.

        `probe`: see Technique.verify, on any device.
        """
        device = next(model.parameters()).device
        probe = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in probe.items()}
        with self.precision.context(device):
            return [evidence for _, technique in self.enabled() for evidence in technique.verify(model, probe)]

    def prove(self, model: nn.Module, probe: dict[str, Any]) -> list[Evidence]:
        """verify(), and a ConfigError that lists every technique that did not act."""
        return require_acted(self.verify(model, probe))


def require_acted(observed: list[Evidence]) -> list[Evidence]:
    """Return `observed`, or raise one ConfigError that lists what did not act."""
    failed = [f"  {one.technique}: asked for {one.asked}; seen: {one.observed}" for one in observed if not one.acted]
    if failed:
        raise ConfigError("Asked for and not done:\n" + "\n".join(failed) + "\nTurn it off, or use another model.")
    return observed


def make_probe(model: nn.Module, packing: bool = True) -> dict[str, Any]:
    """One row of 24 fixed tokens for verify(), on the model's device: packed documents of 7, 8 and 9 tokens, or one of
    24."""
    device = next(model.parameters()).device
    vocabulary = model.config.get_text_config().vocab_size  # type: ignore[union-attr, operator]
    lengths = (7, 8, 9) if packing else (24,)
    positions = torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)
    ids = (torch.arange(24) * 7919 + 3) % vocabulary
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    return model_inputs(model, ids.unsqueeze(0).to(device), positions.to(device), starts.to(device))
