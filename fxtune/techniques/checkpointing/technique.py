"""Activation checkpointing: compute again in the backward pass what one does not want to keep until then.

A layer keeps for its backward pass 139 KB a token (Llama-3-8B, LoRA, compiled), or 110 where adapters are fused. What else it
can do, from fast to small, by the level's name and by the policy of that:

    wide        94 KB   selective: keeps the results of matmuls and attention and repeats what lies between them, a few percent
                        of the time
    narrow      37 KB   with `recompute: [gate_proj, up_proj]`, the widest ones, a third of the layer's matmuls
    attention   16 KB   with `save: [attention]`, which is two thirds of a layer's time at 64k tokens
    input        8 KB   full: keeps the layer's input and repeats all of it, a third more time
    + offload           and that waits in host memory (kernels/offload.py): no more time where a layer computes for longer than
                        its input travels, from some thousand tokens on. With `offload_what: kept` what narrow or attention keep
                        goes along, which leaves 0 KB, or gate and up, on the device
    + mlp_tiles         the MLP a part of the sequence at a time: what one layer holds while it computes falls
    mix                 so many layers of one level and so many of another: `mix: {narrow: 12, wide: 20}`
    budget              the compiler picks what to keep, up to a share of what it would
    auto                of all of these but budget, mixes included, the one that by the arithmetic of fxtune/techniques/estimate/memory.py fits the
                        memory that is free and by that of fxtune/techniques/estimate/step_time.py adds least time

Layers are wrapped here, not by transformers' own switch: that one changed its name and its meaning within the versions we
serve, acts only in training mode, and needs care with frozen embeddings. The non-reentrant form of torch needs no input
that requires a gradient, keeps the random state (so dropout repeats itself in the recomputation) and stops recomputing as
soon as it has what the backward pass needs. Under torch.compile the same wrapper is traced, and the compiler, which sees
forward and backward at once, leaves out of both whatever nobody needs. Layers of one level share a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, Optional

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fxtune.distributed.world import World
from fxtune.errors import nearest
from fxtune.models.structure import backbone, decoder_layers, skeleton
from fxtune.system.units import GIB
from fxtune.techniques.base import Evidence, Technique
from fxtune.techniques.checkpointing import policy as selective
from fxtune.techniques.checkpointing import verify as witness
from fxtune.techniques.checkpointing.offload import Offload
from fxtune.techniques.checkpointing.plan import LEVELS, RecomputePlan
from fxtune.techniques.checkpointing.policy import GROUPS, Rule
from fxtune.techniques.checkpointing.tiled_mlp import tile
from fxtune.techniques.estimate import step_time
from fxtune.techniques.estimate.memory import Need, forecast
from fxtune.techniques.lora import fuse

if TYPE_CHECKING:
    from fxtune.techniques.facts import Facts

HOST_SHARE = 0.8
"""Of the host's memory, what offloaded tensors may fill."""
TILES = (4, 16)
"""What `auto` tries for mlp_tiles."""
ROOM = 0.95
"""Of the free memory, what `auto` fills if it can: a mix goes up to the limit, and a forecast may be wrong by some percent."""


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


POLICIES = {
    "everything": Policy.none,
    "wide": Policy.selective,
    "narrow": Policy.selective,
    "attention": Policy.selective,
    "input": Policy.full,
}
"""The policy of each level."""


@dataclass
class Checkpointing(Technique):
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
                f"{self.policy.value}. Empty it, or set policy=policy."
            )
        elif self.save or self.recompute:
            yield from self._names(facts)
        if self.mix or self.policy is Policy.mix:
            yield from self._counts(layers)
        if self.policy is Policy.budget:
            if not 0 <= self.budget <= 1:
                yield f"budget: {self.budget} must be from 0 to 1."
            if not facts.techniques.compile.enabled:
                yield "policy: budget is the compiler's, and techniques.compile.enabled=false. Set it to true, or use policy."
        elif self.budget != Checkpointing.budget:
            yield (
                f"budget: read by policy=budget alone, and policy is {self.policy.value}. Leave it out (it is "
                f"{Checkpointing.budget}), or set policy=budget."
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
                    close = nearest(name, known, 0.5)
                    hint = f" Did you mean {close}?" if close else ""
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
                close = nearest(level, LEVELS, 0.5)
                yield (
                    f"mix: {level} is nothing that a layer may keep. Use {', '.join(LEVELS)}."
                    + (f" Did you mean {close}?" if close else "")
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
        if self.offload_what is What.kept and not facts.techniques.compile.enabled:
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
            fit = step_time.limit_senders(facts, keeping, limit)[0].senders or 0
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

    def resolve(self, facts: Facts) -> str | None:
        """For `auto`: what adds least time of all that fits."""
        if self.policy is not Policy.auto:
            return None
        ways = list(self._ways(facts))
        host = HOST_SHARE * facts.host_memory
        choice = step_time.fastest(
            replace(facts, free_memory=int(ROOM * facts.free_memory)), ways, host
        ) or step_time.fastest(facts, ways, host)
        if choice is None:  # by the forecast, which may be wrong by some percent: the smallest is tried
            smallest = [step_time.limit_senders(facts, replace(way, level=levels[0]), host) for way, levels in ways]
            keeping, need = min((one for one in smallest if one[1].host <= host), key=lambda one: one[1].device)
            self._become(keeping, facts)
            return (
                f"{self.told()}: the smallest there is, and it needs some {_room(facts, need)} ({_shares(need)}). It may run "
                "out of memory: shorten data.sequence_length, or quantise the base."
            )
        self._become(choice.plan, facts)
        everything = forecast(facts, RecomputePlan())
        less = (
            "" if everything.device <= facts.free_memory else f"; everything would need {everything.device / GIB:.1f}"
        )
        return (
            f"{self.told()}: {_room(facts, choice.need)} ({_shares(choice.need)}), which by arithmetic adds "
            f"{choice.overhead / choice.step:.0%} to the layers' time{less}"
        )

    def _ways(self, facts: Facts) -> Iterator[tuple[RecomputePlan, tuple[str, ...]]]:
        """What `auto` tries: whether to send and to tile, each with the levels that go with it. What is asked for stays."""
        whole = replace(self, policy=Policy.full)
        several = (facts.text.get("num_hidden_layers") or 2) > 1
        able = facts.device == "cuda" and scope_of(facts) != "model" and several
        kept = ["kept"] if facts.techniques.compile.enabled else []
        sent = [self.offload_what.value] if self.offload_what is What.kept else ["inputs", *kept]
        sent = sent if self.offload else ["", *sent] if able else [""]
        tiles = [self.mlp_tiles]
        if self.mlp_tiles == 1 and not list(replace(whole, mlp_tiles=TILES[0])._tiles(facts)):
            tiles += TILES
        for way in sent:
            for pieces in tiles:
                # Products that are as wide as nothing else are told from others by their names, if the MLP has a form we know.
                levels = [
                    level
                    for level in LEVELS
                    if (level != "narrow" or _wide(facts))
                    and (level != "wide" or pieces == 1)
                    and (level != "everything" or (pieces == 1 and not way))
                ]
                yield RecomputePlan(sent=way, senders=self.offload_layers, tiles=pieces), tuple(levels)

    def _become(self, keeping: RecomputePlan, facts: Facts) -> None:
        """Take the options that `keeping` stands for."""
        levels = [level for level, count in keeping.mix if count]
        self.mix = dict(keeping.mix) if len(levels) > 1 else {}
        level = keeping.level if not keeping.mix else levels[0]
        uniform = self._uniform(level, _wide(facts))
        self.policy = Policy.mix if self.mix else uniform.policy
        self.save, self.recompute = ([], []) if self.mix else (uniform.save, uniform.recompute)
        sends = any(keeping.sending(facts.text.get("num_hidden_layers") or 1))
        self.offload, self.offload_layers = sends, keeping.senders if sends else None
        more = keeping.sent == "kept" and set(levels or [level]) != {"input"}
        self.offload_what = What.kept if sends and more else What.inputs
        self.mlp_tiles, self.every = keeping.tiles, 1

    def _uniform(self, level: str, wide: list[str]) -> Checkpointing:
        """These options with one level for all layers. `wide`: the linears of the MLP that are wider than their input."""
        return replace(
            self,
            policy=POLICIES[level],
            mix={},
            save=["attention"] if level == "attention" else [],
            recompute=list(wide) if level == "narrow" else [],
        )

    def apply(self, model: nn.Module, world: World) -> nn.Module:
        layers = decoder_layers(model)
        kinds = self._kinds(layers)
        contexts = {
            level: own._rule(layers).contexts() for level, own in kinds.items() if own.policy is Policy.selective
        }
        keeping = self.keeping()
        levels, sending = keeping.levels(len(layers)), keeping.sending(len(layers))
        for layer, level in zip(layers, levels, strict=True):
            kinds[level]._wrap(layer, contexts.get(level))
        if self.policy is Policy.budget:
            # Around the model as it is called in training and in a test, since the compiler reads this when a layer first runs.
            base = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
            for module in {id(one): one for one in (model, base, backbone(model))}.values():
                _Budget(self.budget).around(module)
        if self.offload:
            # And the next layer, whose backward pass is the sign that the last one that sends is wanted.
            senders = [layer for layer, sends in zip(layers, sending, strict=True) if sends]
            above = layers[len(sending) - sending[::-1].index(True)]
            wide = [outward for inward, outward in linears_of_mlp(layers[0]).values() if outward > inward]
            model.offload = Offload(
                [*senders, above],
                world.device,
                self.offload_what is What.kept,  # type: ignore[assignment]
                frozenset([*wide, sum(wide)]),
            )
        return model

    def _kinds(self, layers: list[nn.Module]) -> dict[str, Checkpointing]:
        """For each level that Keeping.levels() names, the options of its layers."""
        wide = [name for name, (inward, outward) in linears_of_mlp(layers[0]).items() if outward > inward]
        if self.mix:
            return {level: self._uniform(level, wide) for level in LEVELS}
        return {"everything": self._uniform("everything", wide), self.keeping().level: self}

    def _wrap(self, layer: nn.Module, contexts: Any) -> None:
        """Make one layer do what these options say of all."""
        repeated = self.policy in (Policy.selective, Policy.full)
        for mlp in filter(fuse.is_fused_mlp, layer.modules()):
            wide, whole = self._of_fused_mlp()
            # Where a norm reads the MLP's result (Gemma 2, Olmo 2), recomputing the layer runs all of the operator again.
            again = repeated and not whole and hasattr(layer, "post_feedforward_layernorm")
            mlp.tiles, mlp.keep, mlp.recomputed = self.mlp_tiles, wide or again, repeated and not whole  # type: ignore
        if self.mlp_tiles > 1 and not fuse.is_fused_mlp(layer.mlp):
            tile(layer.mlp, self.mlp_tiles, repeated)  # type: ignore[arg-type]
        if repeated:
            layer.forward = partial(_checkpointed, layer.forward, contexts)

    def _rule(self, layers: list[nn.Module]) -> Rule:
        """What `save`, `recompute` and `mlp_tiles` come to, for layers as they are."""
        shapes = {name: shape for layer in layers for name, shape in selective.linears(layer).items()}
        tiled = selective.linears(layers[0].mlp) if self.mlp_tiles > 1 else {}  # type: ignore[arg-type]
        named = {name: name in self.save for name in [*self.save, *self.recompute] if name in shapes}
        named |= dict.fromkeys(tiled, False)
        saved, recomputed = (
            [name for name in names if name not in shapes] for names in (self.save or GROUPS, self.recompute)
        )
        rule = Rule(tuple(saved), tuple(recomputed), ranks=selective.ranks(layers[0]))
        groups, kept = dict(fuse.group_sizes(layers[0])), {}  # type: tuple[dict[str, tuple[int, int]], dict[tuple[int, int], bool]]
        for name, size in groups.items():  # fused linears are kept together, if one of them is
            kept[size] = kept.get(size, False) or named.get(name, rule.keeps_all("fxtune.lora_linear"))
        kept |= {shapes[name]: keeps for name, keeps in named.items() if name not in groups}
        if any(map(fuse.is_fused_mlp, layers[0].modules())):
            (saved if self._of_fused_mlp()[1] else recomputed).append("fxtune.lora_mlp")
        return rule._replace(
            saved=tuple(saved),
            recomputed=tuple(recomputed),
            linears=tuple((*size, keeps) for size, keeps in kept.items()),
        )

    def _of_fused_mlp(self) -> tuple[bool, bool]:
        """Of an MLP that is one operator: whether gate and up are kept, and whether its result is."""
        if self.mlp_tiles > 1 or self.policy is Policy.full:
            return False, False
        if self.policy is not Policy.selective:
            return True, True
        other = Rule(tuple(self.save or GROUPS), tuple(self.recompute)).keeps_all("fxtune.lora_mlp")
        gate, up, down = (name in self.save or (other and name not in self.recompute) for name in fuse.MLP)
        return gate or up, gate or up or down

    def verify(self, model: nn.Module, probe: dict[str, Any]) -> Iterator[Evidence]:
        """Count what runs once and twice in one forward and backward, and look at what autograd keeps in between."""
        layers, keeping = decoder_layers(model), self.keeping()
        levels, kinds = keeping.levels(len(layers)), self._kinds(layers)
        rules = {level: Rule(()) if own.policy is Policy.full else own._rule(layers) for level, own in kinds.items()}
        asked = {
            Policy.selective: f"kept: {', '.join(self.save or GROUPS)}"
            + (f"; recomputed: {', '.join(self.recompute)}" if self.recompute else ""),
            Policy.full: "attention and matmuls run again",
            Policy.budget: f"the compiler keeps {self.budget:.0%}",
            Policy.mix: self.told(),
            Policy.none: "nothing runs again",
        }[self.policy]
        yield from witness.evidence(
            model,
            witness.Asked(
                asked,
                levels,
                [rules[level] for level in levels],
                [*self.save, *self.recompute],
                self.budget if self.policy is Policy.budget else None,
                self.mlp_tiles,
                keeping.sending(len(layers)),
                self.offload_what is What.kept,
            ),
            probe,
        )


class _Budget:
    """Sets the compiler's budget while a module runs, and then sets it back."""

    def __init__(self, budget: float) -> None:
        self.budget, self.open = budget, []  # type: tuple[float, list[Any]]

    def around(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self._enter)
        module.register_forward_hook(self._leave, always_call=True)

    def _enter(self, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            patch = torch._functorch.config.patch(activation_memory_budget=self.budget)
            patch.__enter__()
            self.open.append(patch)

    def _leave(self, *_: Any) -> None:
        if not torch.compiler.is_compiling() and self.open:
            self.open.pop().__exit__(None, None, None)


def _checkpointed(forward: Callable[..., Any], contexts: Any, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():  # evaluation and generation keep nothing, so there is nothing to save
        return forward(*args, **kwargs)
    if contexts is None:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _wide(facts: Facts) -> list[str]:
    """The linears of the MLP that are wider than what goes in."""
    layer = layer_of(facts.model)
    return (
        [name for name, (inward, outward) in linears_of_mlp(layer).items() if outward > inward]
        if layer is not None
        else []
    )


def _room(facts: Facts, need: Need) -> str:
    host = f" and {need.host / GIB:.1f} GiB of host memory" if need.host else ""
    return f"{need.device / GIB:.1f} of {facts.free_memory / GIB:.1f} GiB free{host}"


def _shares(need: Need) -> str:
    return (
        f"weights {need.weights / GIB:.1f}, gradients and optimizer {need.trained / GIB:.1f}, kept by the layers "
        f"{need.kept / GIB:.1f}, one layer at work {max(need.layer, need.loss) / GIB:.1f}"
    )


def layer_of(config: dict[str, Any]) -> nn.Module | None:
    """The first decoder layer of this model without its weights, or None where only the author's own code can build it."""
    model = skeleton(config)
    return None if model is None else decoder_layers(model)[0]


def scope_of(facts: Facts) -> str:
    """What techniques.compile makes a graph of: layers, model, or nothing."""
    compiler = facts.techniques.compile
    return compiler.scope.value if compiler.enabled else ""


def linears_of_mlp(layer: nn.Module) -> dict[str, tuple[int, int]]:
    mlp = getattr(layer, "mlp", None)
    return selective.linears(mlp) if isinstance(mlp, nn.Module) else {}
