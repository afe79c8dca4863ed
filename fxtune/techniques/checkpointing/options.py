"""What may be asked of layers to keep or to compute again in the backward pass: the options of techniques.checkpointing.

techniques/checkpointing.py says what they mean and does it. Here is what each may be, what is wrong with one beside the others,
on this machine or for this model, and what they come to in the words of the forecast (`keeping`) and of a reader (`told`).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Optional

from torch import nn

from fxtune.models.dims import LEVELS, RecomputePlan
from fxtune.models.structure import decoder_layers, skeleton
from fxtune.system.facts import Facts
from fxtune.techniques.base import Technique
from fxtune.techniques.checkpointing import policy as selective
from fxtune.techniques.checkpointing.policy import GROUPS
from fxtune.techniques.estimate import step_time
from fxtune.techniques.estimate.memory import forecast

GIB = 1 << 30
HOST_SHARE = 0.8
"""Of the host's memory, what offloaded tensors may fill."""


class Policy(str, Enum):
    none = "none"
    selective = "selective"
    full = "full"
    mix = "mix"
    budget = "budget"
    auto = "auto"


class What(str, Enum):
    inputs = "inputs"
    kept = "kept"


@dataclass
class Recomputation(Technique):
    """The options of techniques.checkpointing, and each reason why they cannot be had."""

    policy: Policy = Policy.full
    """What layers keep for the backward pass. `none`: everything; `selective`: what `save` and `recompute` say; `full`: their
    input; `mix`: what `mix` says of each; `budget`: what the compiler picks; `auto`: the fastest of these that fits, with
    `offload` and `mlp_tiles` where it needs them."""
    every: int = field(default=1, metadata={"min": 1})
    """Treat one decoder layer in this many: 1 is all of them, 2 every other one. Of the policies selective and full."""
    save: list[str] = field(default_factory=list)
    """policy=selective: whose results are kept: operators (`aten.mm`), groups (`attention`, `matmuls`), linears of a layer
    (`q_proj`). Empty: both groups. A linear's name decides over its operator's, that over its group's."""
    recompute: list[str] = field(default_factory=list)
    """policy=selective: exceptions from `save`, in the same words: [gate_proj, up_proj] keeps what is left of `matmuls`."""
    mix: dict[str, int] = field(default_factory=dict)
    """policy=mix: how many layers keep `everything`, the `wide` products (gate, up) and all below, the `narrow` ones (q, k, v,
    o) and all below, `attention`, or their `input`: {narrow: 12, wide: 20}. Layers that are not counted keep their input. Those
    that keep little come first."""
    budget: float = field(default=0.5, metadata={"min": 0, "max": 1})
    """policy=budget: which share of what the compiler would keep it may keep. 0: layers' inputs only; 1: all it would."""
    offload: bool = False
    """Keep what offload_what says in pinned host memory from forward to backward, in time with the computation (needs a GPU)."""
    offload_what: What = What.inputs
    """`inputs`: layers' inputs; `kept`: also what else they keep, but for the products wider than the hidden state (compiled)."""
    offload_layers: Optional[int] = field(default=None, metadata={"min": 1})
    """How many layers send, from the first; null: all but the last one, whose share is wanted at once."""
    mlp_tiles: int = field(default=1, metadata={"min": 1})
    """Run each MLP in this many tiles of the sequence and recompute them one by one; 1: whole."""

    def check(self, facts: Facts) -> Iterator[str]:
        layers = facts.text.get("num_hidden_layers")
        if self.every < 1 or (layers and self.every > layers):
            yield f"every: {self.every} must be at least 1 and at most the model's {layers or ''} layers."
        if self.policy not in (Policy.selective, Policy.full) and self.every != 1:
            yield f"every: {self.every} is not read by policy={self.policy.value}. Set it to 1."
        if self.policy is not Policy.selective and (self.save or self.recompute):
            yield (
                f"{'save' if self.save else 'recompute'}: read by policy=selective alone, and policy is "
                f"{self.policy.value}. Empty it, or set policy=selective."
            )
        elif self.save or self.recompute:
            yield from self._names(facts)
        if self.mix or self.policy is Policy.mix:
            yield from self._counts(layers)
        if self.policy is Policy.budget:
            if not 0 <= self.budget <= 1:
                yield f"budget: {self.budget} must be from 0 to 1."
            if "compile" not in facts.techniques:
                yield "policy: budget is the compiler's, and techniques.compile.enabled=false. Set it to true, or use selective."
        elif self.budget != Recomputation.budget:
            yield (
                f"budget: read by policy=budget alone, and policy is {self.policy.value}. Leave it out (it is "
                f"{Recomputation.budget}), or set policy=budget."
            )
        if self.offload:
            yield from self._offloads(facts)
        elif self.offload_what is not What.inputs or self.offload_layers is not None:
            name = "offload_layers" if self.offload_layers is not None else "offload_what"
            yield f"{name}: read where offload=true, and it is false. Set it to true, or leave {name} out."
        if self.mlp_tiles != 1:
            yield from self._tiles(facts)

    def _names(self, facts: Facts) -> Iterator[str]:
        """What is wrong with `save` and `recompute`."""
        for name in sorted(set(self.save) & set(self.recompute)):
            yield f"recompute: {name} stands in save, too. Take it out of one of them."
        layer = layer_of(facts.model)
        shapes = selective.linears(layer) if layer else {}
        known = [*GROUPS, *shapes, *selective.operators()]
        for option, names in (("save", self.save), ("recompute", self.recompute)):
            for name in names:
                if name not in known and (layer or "." in name):
                    close = difflib.get_close_matches(name, known, 1, 0.5)
                    hint = f" Did you mean {close[0]}?" if close else ""
                    yield (
                        f"{option}: {name} is no operator that torch knows, no group ({', '.join(GROUPS)}) and no linear of "
                        f"this model ({', '.join(shapes)}).{hint}"
                    )
        for name in self.recompute:
            twins = sorted(other for other in self.save if name in shapes and shapes[name] == shapes.get(other))
            if twins:
                yield (
                    f"recompute: {name} has the shape of {', '.join(twins)} in save, {shapes[name]}, and products are told "
                    "apart by their shape. Put them in the same list."
                )

    def _counts(self, layers: int | None) -> Iterator[str]:
        """What is wrong with `mix`."""
        if self.policy is not Policy.mix:
            yield f"mix: read by policy=mix alone, and policy is {self.policy.value}. Empty it, or set policy=mix."
        for level in self.mix:
            if level not in LEVELS:
                close = difflib.get_close_matches(level, LEVELS, 1, 0.5)
                yield (
                    f"mix: {level} is nothing that a layer may keep. Use {', '.join(LEVELS)}."
                    + (f" Did you mean {close[0]}?" if close else "")
                )
        if any(count < 0 for count in self.mix.values()):
            yield f"mix: {min(self.mix.values())} layers are less than none. Use 0 or more."
        if not any(self.mix.values()):
            yield "mix: counts no layer. Say how many keep what, such as {narrow: 12, wide: 20}."
        elif layers and sum(self.mix.values()) > layers:
            yield f"mix: counts {sum(self.mix.values())} layers, and the model has {layers}. Lower one of the numbers."
        tiled = sorted({"wide", "everything"} & {level for level, count in self.mix.items() if count})
        if self.mlp_tiles > 1 and tiled:
            yield f"mix: mlp_tiles={self.mlp_tiles} keeps nothing of an MLP, so no layer can keep {' or '.join(tiled)}."

    def _offloads(self, facts: Facts) -> Iterator[str]:
        if self.policy in (Policy.none, Policy.budget):
            yield (
                f"offload: policy={self.policy.value} keeps more than layers' inputs on the device, so little would be won. "
                "Use full, selective or mix, or set it to false."
            )
        if facts.device != "cuda":
            yield f"offload: brings tensors from a GPU to host memory, and this runs on {facts.device}. Set it to false."
        if scope_of(facts) == "model":
            yield (
                "offload: techniques.compile.scope=model makes one graph of all layers, with no place between them. Use "
                "scope=layers."
            )
        if self.offload_what is What.kept and self.policy is Policy.full:
            yield "offload_what: policy=full keeps nothing but layers' inputs. Set it to inputs."
        if self.offload_what is What.kept and "compile" not in facts.techniques:
            yield (
                "offload_what: kept is what compiled layers hand to autograd, and techniques.compile.enabled=false. Set it to "
                "inputs, or techniques.compile.enabled=true."
            )
        layers = facts.text.get("num_hidden_layers")
        if layers and self.policy is not Policy.auto and not any(self.keeping().sending(layers)):
            yield (
                f"offload: the last layer's input stays, and with {layers} layers, every={self.every} and "
                f"offload_layers={self.offload_layers} there is no other. Set it to false."
            )
        keeping = self.keeping()
        need, limit = forecast(facts, keeping).host, HOST_SHARE * facts.host_memory
        if facts.device == "cuda" and need > limit and self.policy is not Policy.auto:
            fit = step_time.within(facts, keeping, limit)[0].senders or 0
            what = "inputs" if self.offload_what is What.inputs else "kept tensors"
            yield (
                f"offload: the {what} of {sum(keeping.sending(layers or 1))} layers take {need / GIB:.1f} GiB of host memory, "
                f"and {HOST_SHARE:.0%} of this machine's is {limit / GIB:.1f}. "
                + (f"Set offload_layers={fit}" if fit else "Set it to false")
                + ", or shorten data.sequence_length."
            )

    def _tiles(self, facts: Facts) -> Iterator[str]:
        layer = layer_of(facts.model)
        mlp = getattr(layer, "mlp", None)
        if self.mlp_tiles < 1:
            yield f"mlp_tiles: {self.mlp_tiles} must be at least 1."
        if self.policy is Policy.budget:
            yield "mlp_tiles: policy=budget leaves the choice to the compiler. Set it to 1, or use selective or full."
        if self.every > 1:
            yield f"mlp_tiles: with every={self.every} the layers between keep their MLP whole. Set one of them to 1."
        if facts.text.get("num_local_experts") or facts.text.get("num_experts"):
            yield "mlp_tiles: the experts of this model do not treat each token alone. Set it to 1."
        elif layer is not None and mlp is None:
            yield "mlp_tiles: the layers of this model have no part named mlp. Set it to 1."
        if inside := sorted(set(self.save) & set(selective.linears(mlp) if mlp is not None else ())):
            yield f"mlp_tiles: tiles keep nothing of the MLP, and save names {', '.join(inside)}. Take it out, or set tiles to 1."

    def keeping(self) -> RecomputePlan:
        """These options as memory.forecast() takes them."""
        level = {Policy.none: "everything", Policy.budget: "budget", Policy.selective: "wide"}.get(
            self.policy, "input"
        )
        if self.policy is Policy.selective and self.save == ["attention"]:
            level = "attention"
        elif self.policy is Policy.selective and self.recompute:
            level = "narrow"
        return RecomputePlan(
            level,
            self.every,
            self.budget,
            tuple(self.mix.items()),
            self.offload_what.value if self.offload else "",
            self.offload_layers,
            self.mlp_tiles,
        )

    def told(self) -> str:
        """What layers keep, in words."""
        keeping, parts = self.keeping(), []
        if self.mix:
            parts.append(
                " and ".join(
                    f"{level} in {count} layer{'s' * (count != 1)}"
                    for level in LEVELS
                    if (count := self.mix.get(level, 0))
                )
            )
        else:
            parts.append(f"{keeping.level} in {'every layer' if self.every == 1 else f'one layer of {self.every}'}")
        if self.offload:
            wide = ", but for gate and up," * ("wide" in [keeping.level, *self.mix])
            what = "inputs" if self.offload_what is What.inputs else f"what they keep{wide}"
            parts.append(
                f"{what} of {'all but the last' if self.offload_layers is None else f'the first {self.offload_layers}'}"
                " in host memory"
            )
        return ", ".join([*parts, *([f"MLPs in {self.mlp_tiles} tiles"] if self.mlp_tiles > 1 else [])])


def layer_of(config: dict[str, Any]) -> nn.Module | None:
    """The first decoder layer of this model without its weights, or None where only the author's own code can build it."""
    model = skeleton(config)
    return None if model is None else decoder_layers(model)[0]


def scope_of(facts: Facts) -> str:
    """What techniques.compile makes a graph of: layers, model, or nothing."""
    scope = facts.techniques.get("compile", {}).get("scope", "")
    return str(getattr(scope, "value", scope))


def linears_of_mlp(layer: nn.Module) -> dict[str, tuple[int, int]]:
    mlp = getattr(layer, "mlp", None)
    return selective.linears(mlp) if isinstance(mlp, nn.Module) else {}
