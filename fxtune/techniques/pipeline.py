"""The order of the techniques, one reason beside each. This dataclass is the recipe's `techniques` group."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from fxtune.distributed.world import World
from fxtune.errors import ConfigError
from fxtune.models import load as models
from fxtune.models.load import ModelConfig
from fxtune.system.facts import Facts
from fxtune.techniques.apex import Apex
from fxtune.techniques.attention.inputs import model_inputs
from fxtune.techniques.attention.technique import Attention
from fxtune.techniques.base import Evidence, Technique
from fxtune.techniques.checkpointing.plan import RecomputePlan
from fxtune.techniques.checkpointing.technique import Checkpointing
from fxtune.techniques.compile.technique import Compile
from fxtune.techniques.estimate.memory import Need, forecast
from fxtune.techniques.liger.technique import Liger
from fxtune.techniques.lora.technique import Lora
from fxtune.techniques.precision import Precision
from fxtune.techniques.quantize import Quantize
from fxtune.techniques.rope import Rope, own_scaling

GIB = 2**30
FAR = 2
"""Times a host's memory: beyond that a step is refused, whatever a forecast may be wrong by."""


@dataclass
class Pipeline:
    rope: Rope = field(default_factory=Rope)  # before the model exists: inv_freq is computed by its constructor
    attention: Attention = field(default_factory=Attention)  # likewise: layers choose their kernel when they are built
    precision: Precision = field(default_factory=Precision)  # on the built base, before adapters copy its dtype
    liger: Liger = field(
        default_factory=Liger
    )  # replaces modules of the base; adapters wrap what it leaves, never the reverse
    apex: Apex = field(default_factory=Apex)  # likewise; these two exclude each other
    quantize: Quantize = field(default_factory=Quantize)  # the frozen linears, before adapters wrap them
    lora: Lora = field(default_factory=Lora)  # wraps the base's linears, so all that edits the base is done
    checkpointing: Checkpointing = field(default_factory=Checkpointing)  # wraps whole layers, adapters included
    compile: Compile = field(default_factory=Compile)  # last: traces whatever the layers have become

    def enabled(self) -> Iterator[tuple[str, Technique]]:
        """The techniques that are asked for, by name, in order of application."""
        for entry in dataclasses.fields(self):
            technique = getattr(self, entry.name)
            if technique.enabled:
                yield entry.name, technique

    def asked(self) -> dict[str, dict[str, Any]]:
        """The options of the enabled techniques, by name."""
        return {name: dataclasses.asdict(technique) for name, technique in self.enabled()}

    def idle(self) -> list[str]:
        """What is set of a technique that is off, a line for each such technique: the likely slip is a forgotten `enabled`."""
        notes = []
        for entry in dataclasses.fields(self):
            technique = getattr(self, entry.name)
            given, default = dataclasses.asdict(technique), dataclasses.asdict(type(technique)())
            told = ", ".join(
                f"{key}={getattr(value, 'value', value)}"
                for key, value in given.items()
                if key != "enabled" and value != default[key]
            )
            if told and not technique.enabled:
                notes.append(
                    f"{entry.name}: off, so {told} does nothing. To have it: techniques.{entry.name}.enabled=true"
                )
        return notes

    def ready(self, facts: Facts, besides: Sequence[str] = ()) -> tuple[Pipeline, list[str]]:
        """A copy in which each `auto` is decided for `facts`, and what was decided and why. Raises as check() does.

        `besides`: what else cannot run, to be told together with this.
        """
        self.check(facts, besides)
        chosen, notes = copy.deepcopy(self), []
        for name, technique in chosen.enabled():
            if why := technique.resolve(replace(facts, techniques=chosen.asked())):
                notes.append(f"{name}: {why}")
        chosen.check(facts)
        if not self.rope.enabled and (scaling := own_scaling(facts.text)):
            notes.append(f"rope: the model's own scaling, {scaling}")
        return chosen, notes

    def check(self, facts: Facts, besides: Sequence[str] = ()) -> None:
        """Raise one ConfigError with every reason why these techniques cannot run under `facts`, each with its key."""
        facts = replace(facts, techniques=self.asked())
        reasons = [
            f"techniques.{name}.{reason}" for name, technique in self.enabled() for reason in technique.check(facts)
        ]
        reasons += [*self._without(facts), *self._too_large(facts), *besides]
        if reasons:
            raise ConfigError("This cannot run here as asked:\n" + "\n".join(f"  {reason}" for reason in reasons))

    def _without(self, facts: Facts) -> Iterator[str]:
        """What goes wrong when a technique is off."""
        if facts.packing and not self.attention.enabled:
            yield (
                "techniques.attention.enabled: false, but data.packing=true needs its proof that documents do not see each "
                "other. Set it to true."
            )
        if facts.dtype == "float16" and not self.lora.enabled:
            yield (
                "techniques.lora.enabled: false, but model.dtype=float16 holds no weights that can be trained (their "
                "updates underflow). Set it to true, or model.dtype to bfloat16 or float32."
            )
        positions = (facts.model.get("text_config") or facts.model).get("max_position_embeddings")
        if positions and facts.sequence_length > positions and not self.rope.enabled:
            yield (
                f"techniques.rope.enabled: false, but data.sequence_length={facts.sequence_length} is beyond the "
                f"{positions} positions that the model was trained on. Shorten the rows, or scale its RoPE."
            )

    def need(self, facts: Facts) -> Need:
        """The bytes that a training step will need under `facts`, by these techniques; see memory.forecast()."""
        keeping = self.checkpointing.keeping() if self.checkpointing.enabled else RecomputePlan()
        return forecast(replace(facts, techniques=self.asked()), keeping)

    def _too_large(self, facts: Facts) -> Iterator[str]:
        """What cannot fit into a host's memory. A card says so itself, and at once; a host swaps or ends the process, late."""
        if facts.device != "cpu" or not facts.memory:
            return
        need = self.need(facts)
        fixed = need.weights + need.trained
        least = fixed + need.kept + need.layer  # not the loss: whether it is fused may not be decided yet
        here = f"and this machine has {facts.memory / GIB:.1f} GiB"
        if fixed > facts.memory:
            ways = [
                *(
                    ["techniques.lora.enabled=true"]
                    if not self.lora.enabled
                    else ["techniques.quantize.enabled=true"]
                    if not self.quantize.enabled
                    else []
                ),
                *(["model.dtype=bfloat16"] if facts.dtype == "float32" else []),
                "a smaller model",
            ]
            yield (
                f"model.path: its weights in {facts.dtype}, gradients and the optimizer's moments take {fixed / GIB:.1f} GiB, "
                f"{here}. Use {', '.join(ways)}, or a GPU."
            )
        elif least > FAR * facts.memory:
            ways = [
                *(["techniques.checkpointing.enabled=true"] if not self.checkpointing.enabled else []),
                *(["train.micro_batch_size=1"] if facts.micro_batch_size > 1 else []),
                "shorter rows",
            ]
            yield (
                f"data.sequence_length: a step of {facts.micro_batch_size} x {max(facts.rows, default=facts.sequence_length)} "
                f"tokens needs some {least / GIB:.0f} GiB, {here}. Use {', '.join(ways)}, or a GPU."
            )

    def build(self, model: ModelConfig, hf_config: Any, world: World, seed: int) -> nn.Module:
        """Configure, build the model and apply the techniques, in order; ready() comes first. Adapters are drawn from `seed`.

        `hf_config` is what load_config() gave; it stays as it is.
        """
        if model.adapter and not self.lora.enabled:
            raise ConfigError(
                f"model.adapter={model.adapter}, but techniques.lora.enabled=false. Set it to true, or remove "
                "the adapter."
            )
        hf_config = copy.deepcopy(hf_config)
        for _, technique in self.enabled():
            technique.configure(hf_config)
        built: nn.Module = models.build(model, hf_config, world, seed, shrinks=self.quantize.enabled)
        with torch.random.fork_rng(devices=[world.device] if world.device.type == "cuda" else []):
            torch.manual_seed(seed)
            for _, technique in self.enabled():
                # Adapters are measured against the base here and in verify(), both times under training's autocast.
                with self.precision.context(world.device) if technique is self.lora else nullcontext():
                    built = technique.apply(built, world)
                if technique is self.lora and model.adapter:
                    self.lora.start_from(built, model.adapter)
        return built

    def verify(self, model: nn.Module, probe: dict[str, Any]) -> list[Evidence]:
        """What can be observed of every enabled technique on the built model, under the autocast that training has.

        `probe`: see Technique.verify, on any device.
        """
        device = next(model.parameters()).device
        probe = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in probe.items()}
        with self.precision.context(device):
            return [evidence for _, technique in self.enabled() for evidence in technique.verify(model, probe)]

    def prove(self, model: nn.Module, probe: dict[str, Any]) -> list[Evidence]:
        """verify(), and one ConfigError that lists what was asked for and did not act."""
        return refuse(self.verify(model, probe))


def refuse(seen: list[Evidence]) -> list[Evidence]:
    """`seen`, unless something in it did not act: a ConfigError that lists all of it."""
    if failed := [f"  {one.technique}: asked for {one.asked}; seen: {one.observed}" for one in seen if not one.acted]:
        raise ConfigError("Asked for and not done:\n" + "\n".join(failed) + "\nTurn it off, or use another model.")
    return seen


def make_probe(model: nn.Module, packing: bool = True) -> dict[str, Any]:
    """A small row for verify(): 24 fixed tokens on the model's device, three packed documents of 7, 8 and 9 (or one)."""
    device = next(model.parameters()).device
    vocabulary = model.config.get_text_config().vocab_size  # type: ignore[union-attr, operator]
    lengths = (7, 8, 9) if packing else (24,)
    positions = torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)
    ids = (torch.arange(24) * 7919 + 3) % vocabulary
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    return model_inputs(model, ids.unsqueeze(0).to(device), positions.to(device), starts.to(device))
