"""The techniques and the order in which they are applied. The dataclass Pipeline is the recipe's `techniques` group.

A decision that concerns two techniques is made here, so that no technique has to predict another one.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from fxtune.errors import ConfigError, UnavailableError
from fxtune.estimate.memory import Need, forecast
from fxtune.facts.options import AUTO, AutoOptions, Techniques
from fxtune.facts.run import Facts
from fxtune.models.dims import position_limit
from fxtune.models.kinds.known import kind_of
from fxtune.models.prepared import PreparedModel
from fxtune.models.structure import skeleton
from fxtune.system.terminal.progress import phase
from fxtune.system.terminal.units import GIB
from fxtune.techniques import divided_weights
from fxtune.techniques.apex import Apex
from fxtune.techniques.attention import context, recurrent
from fxtune.techniques.attention.inputs import model_inputs
from fxtune.techniques.attention.technique import ISOLATED, SHARES_PROMPT, Attention
from fxtune.techniques.base import Evidence
from fxtune.techniques.checkpointing.technique import Checkpointing
from fxtune.techniques.compile.technique import Compile
from fxtune.techniques.float8 import Float8
from fxtune.techniques.from_plugins import PluginTechniques
from fxtune.techniques.liger.technique import Liger
from fxtune.techniques.lora.technique import Lora
from fxtune.techniques.precision import Precision
from fxtune.techniques.quantize.selection import keeps_shipped
from fxtune.techniques.quantize.technique import Quantize
from fxtune.techniques.rope import Rope, own_scaling
from fxtune.techniques.router import Router

SURELY_TOO_LARGE = 2
"""A step on a CPU is refused if its forecast exceeds this multiple of the host's memory: no forecast is that wrong."""


@dataclass
class Pipeline(Techniques):
    # Rope changes the config before the model exists, because the model's constructor computes inv_freq.
    rope: Rope = field(default_factory=Rope)
    # Attention changes the config before the model exists, because layers choose their kernel in their constructors.
    attention: Attention = field(default_factory=Attention)
    # Precision comes first on the built model: it sets how all later products round.
    precision: Precision = field(default_factory=Precision)
    # Liger replaces modules of the base before adapters wrap the base's modules.
    liger: Liger = field(default_factory=Liger)
    # Apex replaces the same modules as Liger. The two exclude each other.
    apex: Apex = field(default_factory=Apex)
    # Quantize replaces the frozen linears before adapters wrap them.
    quantize: Quantize = field(default_factory=Quantize)
    # Float8 replaces the trained linears. Quantize and LoRA exclude it.
    float8: Float8 = field(default_factory=Float8)
    # LoRA wraps the base's linears, so it follows every change of the base.
    lora: Lora = field(default_factory=Lora)
    # Router sets the auxiliary loss of routers, before checkpointing and compilation wrap the layers with the routers.
    router: Router = field(default_factory=Router)
    # Plugins' techniques see the adapted model before its layers are wrapped and traced.
    plugins: PluginTechniques = field(default_factory=PluginTechniques)
    # Checkpointing wraps whole layers, including their adapters.
    checkpointing: Checkpointing = field(default_factory=Checkpointing)
    # Compilation comes last because it traces the final layers. After all techniques weights are divided over ranks
    # (parallel.shard), so layers are gathered outside of compiled code.
    compile: Compile = field(default_factory=Compile)

    def options(self) -> dict[str, dict[str, Any]]:
        """The options of the enabled techniques, by name."""
        return {name: dataclasses.asdict(technique) for name, technique in self.enabled()}

    def ignored_options(self) -> list[str]:
        """A line for each disabled technique whose options are set. The user has probably forgotten `enabled=true`."""
        notes = []
        for name in (entry.name for entry in dataclasses.fields(self)):
            technique = getattr(self, name)
            options, default = dataclasses.asdict(technique), dataclasses.asdict(type(technique)(enabled=False))
            changed = [
                f"{key}={getattr(value, 'value', value)}" for key, value in options.items() if value != default[key]
            ]
            if changed and not technique.enabled:
                notes.append(
                    f"{name}: off, so {', '.join(changed)} has no effect. To use it: techniques.{name}.enabled=true"
                )
        return notes

    def of_evaluation(self) -> Pipeline:
        """The techniques of an evaluation: all except float8, which is for training only. So weights that were trained
        in fp8 can be evaluated on any device, and the loss is the exported model's."""
        return replace(self, float8=Float8())

    def packages(self, facts: Facts) -> Iterator[str]:
        """The optional packages that the enabled techniques would use under `facts`."""
        facts = replace(facts, techniques=self)
        for _, technique in self.enabled():
            yield from technique.packages(facts)

    def resolved(self, facts: Facts, refusals: Sequence[str] = ()) -> tuple[Pipeline, list[str]]:
        """A copy in which each `auto` is decided for `facts`, and a line on each decision with its reason. Raises the
        ConfigError of check() if the techniques cannot run, or if there are `refusals`."""
        possible, left_out = self.possible(facts)
        possible.check(facts, refusals)
        chosen, notes = possible.decided(facts)
        chosen.check(facts)
        notes = left_out + notes
        if not self.rope.enabled and (scaling := own_scaling(facts.text)):
            notes.append(f"rope: the model's own scaling, {scaling}")
        return chosen, notes

    def possible(self, facts: Facts) -> tuple[Pipeline, list[str]]:
        """A copy in which techniques with `enabled=auto` are off if they cannot act under `facts`, and a line about
        each technique that was switched off."""
        chosen, notes = copy.deepcopy(self), []
        facts = replace(facts, techniques=chosen)
        for name, technique in chosen.enabled():
            optional = isinstance(technique, AutoOptions) and technique.may_stay_off
            if optional and (reason := next(technique.check(facts), None)):
                technique.enabled = False
                notes.append(f"{name}: off, because {_cause(reason)}")
        return chosen, notes

    def decided(self, facts: Facts) -> tuple[Pipeline, list[str]]:
        """resolved() without its checks."""
        chosen, notes = copy.deepcopy(self), []
        facts = replace(facts, techniques=chosen)
        for name, technique in chosen.enabled():
            if why := technique.resolve(facts):
                notes.append(f"{name}: {why}")
            if technique.enabled == AUTO:
                technique.enabled = True
        return chosen, notes

    def check(self, facts: Facts, refusals: Sequence[str] = ()) -> None:
        """Raise one ConfigError with all reasons why these techniques cannot run under `facts`, and with the
        `refusals` of other parts of the recipe. Returns if there are no reasons."""
        facts = replace(facts, techniques=self)
        pairs = ((name, reason) for name, technique in self.enabled() for reason in technique.check(facts))
        reasons = [f"techniques.{name}.{reason}" for name, reason in pairs]
        reasons += [*recurrent.refusals(facts), *self.sharing_refusals(facts)]
        reasons += [*self._missing(facts), *self._too_large(facts), *refusals]
        if reasons:
            raise ConfigError("This cannot run here as asked:\n" + "\n".join(f"  {reason}" for reason in reasons))

    def nondeterministic_option(self, facts: Facts) -> str | None:
        """Why these techniques, with each `auto` decided, cannot run deterministic kernels; None if they can."""
        usual, fixed = (replace(facts, techniques=self, deterministic=on) for on in (False, True))
        reasons = (set(technique.check(fixed)) - set(technique.check(usual)) for _, technique in self.enabled())
        return next((_cause(reason) for some in reasons for reason in sorted(some)), None)

    def sharing_refusals(self, facts: Facts) -> Iterator[str]:
        """Yield each reason why ranks cannot share the work as `facts.degrees` says."""
        facts, degrees = replace(facts, techniques=self), facts.degrees
        if degrees.context > 1:
            yield from (f"parallel.context={degrees.context}: {reason}" for reason in context.refusals(facts))
        if degrees.shard > 1:
            yield from (f"parallel.shard={degrees.shard}: {reason}" for reason in divided_weights.refusals(facts))

    def _missing(self, facts: Facts) -> Iterator[str]:
        """Yield a reason for each disabled technique that this run needs."""
        if facts.packing and not self.attention.enabled:
            yield (
                "techniques.attention.enabled: false, but data.packing=true needs its proof that documents do not see "
                "each other. Set it to true."
            )
        if facts.dtype == "float16" and not self.lora.enabled:
            yield (
                "techniques.lora.enabled: false, but float16 weights cannot be trained (small updates underflow). Set "
                "it to true, or model.dtype to bfloat16 or float32."
            )
        positions = position_limit(facts.text)
        if positions and facts.sequence_length > positions and not self.rope.enabled:
            beyond = f"{facts.sequence_length} is beyond the {positions} positions"
            if facts.text.get("rope_parameters"):
                yield (
                    f"techniques.rope.enabled: false, but data.sequence_length={beyond} that the model was trained "
                    f"on. Set data.sequence_length={positions}, or scale its RoPE (techniques.rope)."
                )
            else:
                yield (
                    f"data.sequence_length: {beyond} that {facts.text.get('model_type')} has embeddings for. Set it "
                    f"to {positions} or less."
                )

    def why_padded(self, facts: Facts) -> str | None:
        """Why `data.packing=auto` pads rows under `facts`; None if rows can be packed."""
        if not self.attention.enabled:
            return "techniques.attention.enabled=false leaves out the proof that packed documents are kept apart"
        facts = replace(facts, techniques=self)
        padded = set(self.attention.check(replace(facts, packing=False)))
        packed = (reason for reason in self.attention.check(replace(facts, packing=True)) if reason not in padded)
        if (why := next(map(_cause, packed), None)) is None and recurrent.by_document(facts):
            return "recurrent layers would run packed documents one by one, uncompiled (data.packing=true asks for it)"
        return why

    def memory_need(self, facts: Facts) -> Need:
        """The bytes that a training step needs under `facts` with these techniques (estimate/memory.py)."""
        facts = replace(facts, techniques=self)
        return forecast(facts, facts.execution.recompute)

    def _too_large(self, facts: Facts) -> Iterator[str]:
        """Yield why a run on a CPU cannot fit into the host's memory. A GPU reports at once that its memory is short.
        A host begins to swap, or kills the process late."""
        if facts.device != "cpu" or not facts.memory:
            return
        need = self.memory_need(facts)
        fixed = need.weights + need.trained
        least = replace(need, loss=0).allocated  # the loss is left out because `auto` may still fuse it
        here = f"and this machine has {facts.memory / GIB:.1f} GiB"
        if fixed > facts.memory:
            taken = (
                f"model.path: its weights in {facts.dtype}, gradients and the optimizer's moments take "
                f"{fixed / GIB:.1f} GiB"
            )
            changes = {
                "techniques.lora.enabled=true": not self.lora.enabled,
                "techniques.quantize.enabled=true": self.lora.enabled and not self.quantize.enabled,
                "model.dtype=bfloat16": facts.dtype == "float32",
                "a smaller model": True,
            }
        elif least > SURELY_TOO_LARGE * facts.memory:
            taken = (
                f"data.sequence_length: a step of {facts.micro_batch_size} x {facts.row_length} tokens needs some "
                f"{least / GIB:.0f} GiB"
            )
            changes = {
                "techniques.checkpointing.enabled=true": not self.checkpointing.enabled,
                "train.micro_batch_size=1": facts.micro_batch_size > 1,
                "shorter rows": True,
            }
        else:
            return
        yield f"{taken}, {here}. Use {', '.join(change for change, helps in changes.items() if helps)}, or a GPU."

    def keeps_mxfp4(self, hf_config: dict[str, Any]) -> bool:
        """Whether a resolved pipeline keeps the MXFP4 codes of a checkpoint's experts."""
        return self.lora.enabled and keeps_shipped(self.quantize, self.lora, skeleton(hf_config))

    def verify(
        self, model: PreparedModel, probe: dict[str, Any], kept: Mapping[str, list[Evidence]] = MappingProxyType({})
    ) -> list[Evidence]:
        """Return what every enabled technique observes on the built model, under training's autocast. `probe` comes
        from make_probe(). `kept`: the evidence of techniques that need not observe again, by name."""
        device = next(model.module.parameters()).device
        probe = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in probe.items()}
        with self.precision.context(device):
            seen: list[Evidence] = []
            for name, technique in self.enabled():
                with acting(name, f"Trying the techniques: {name}"):
                    seen += kept[name] if name in kept else technique.verify(model, probe)
            return seen

    def prove(self, model: PreparedModel, probe: dict[str, Any]) -> list[Evidence]:
        """Return the result of verify(). Raises one ConfigError that lists every technique that did not act."""
        return require_acted(self.verify(model, probe))


@contextmanager
def acting(name: str, work: str) -> Iterator[None]:
    """A context manager that shows `work` while a technique acts, and sets `name` as the key of an UnavailableError
    that has none."""
    try:
        with phase(work, announce=False):
            yield
    except UnavailableError as error:
        error.key = error.key or name
        raise


def _cause(reason: str) -> str:
    """The middle of a reason of Technique.check(). The option before it and the advice after it are cut off."""
    return reason.partition(": ")[2].rpartition(". ")[0]


def require_acted(observed: list[Evidence]) -> list[Evidence]:
    """Return `observed`, or raise one ConfigError that lists the techniques that did not act."""
    idle = [evidence for evidence in observed if not evidence.acted]
    if idle:
        failed = [
            f"  {evidence.technique}: asked for {evidence.asked}; seen: {evidence.observed}" for evidence in idle
        ]
        keys = (evidence.key or evidence.technique for evidence in idle)
        changes = dict.fromkeys(map(_switched_off, keys))
        by_proof = {ISOLATED: "data.packing=false", SHARES_PROMPT: "data.share_prompts=false"}
        change = next(
            (by_proof[evidence.asked] for evidence in idle if evidence.asked in by_proof), ", ".join(changes)
        )
        raise ConfigError("Asked for and not done:\n" + "\n".join(failed) + f"\nSet {change}, or use another model.")
    return observed


def _switched_off(key: str) -> str:
    """The setting that switches off `key`, a technique or a part of one."""
    name, _, part = key.partition(".")
    if name == "liger" and part:
        return f"techniques.liger.kernels to a list without {part}"
    return f"techniques.{key}{'=null' if part == 'train_tokens' else '=off' if part else '.enabled=false'}"


def make_probe(model: nn.Module, packing: bool = True) -> dict[str, Any]:
    """Inputs of one row of 24 fixed tokens for verify(), on the model's device. With `packing` it holds documents of
    7, 8 and 9 tokens, else one document."""
    device = next(model.parameters()).device
    lengths = (7, 8, 9) if packing else (24,)
    positions = torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)
    row = kind_of(model.config).small_row(model, sum(lengths))
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    return {**row, **model_inputs(model, row["input_ids"], positions.to(device), starts.to(device))}
