"""Activation checkpointing: the backward pass recomputes what the forward pass did not save.

The levels, from those that keep little to those that keep much, are in facts/recomputation.py. Host memory can hold
what layers keep (offload.py). This costs no time if computing a layer takes longer than the copy, which is so from a
few thousand tokens on. The MLP can run in parts of the sequence (tiled_mlp.py). This shrinks the working memory of a
layer. `auto` takes the fastest combination that fits the free memory (fxtune/estimate).

fxtune wraps the layers itself. transformers has a switch for checkpointing, but the switch changed its name and
meaning within the supported versions, and it acts only in training mode. torch's non-reentrant checkpoint needs no
input that requires a gradient. It restores the random state, so dropout repeats itself, and it stops the recomputation
when the backward pass has all that it needs. torch.compile traces the same wrapper.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fxtune.distributed.world import World
from fxtune.errors import nearest
from fxtune.estimate import step_time
from fxtune.estimate.memory import HOST_SHARE, Need, forecast, host_for_activations
from fxtune.facts.execution import Execution
from fxtune.facts.options import CheckpointingOptions, Offloaded, Policy
from fxtune.facts.recomputation import LEVELS, RecomputePlan
from fxtune.facts.run import Facts
from fxtune.models.dims import Shape
from fxtune.models.kinds.image_decoder.parts import encoder_layers
from fxtune.models.prepared import PreparedModel
from fxtune.models.structure import backbone, decoder_layers, skeleton
from fxtune.system.terminal.units import GIB
from fxtune.techniques.base import Evidence, Technique
from fxtune.techniques.checkpointing import policy as selective
from fxtune.techniques.checkpointing.offload import Offload
from fxtune.techniques.checkpointing.policy import GROUPS, Rule
from fxtune.techniques.checkpointing.tiled_mlp import TiledMlp
from fxtune.techniques.checkpointing.verify import Proof, vision_encoder_evidence
from fxtune.techniques.experts.adapted import grouped, operator_of
from fxtune.techniques.lora import families, fuse
from fxtune.techniques.lora.fused_modules import FusedMlp
from fxtune.upstream import torch as upstream

TILES = (4, 16)
"""The values of mlp_tiles that `auto` tries."""
MEMORY_SHARE = 0.95
"""`auto` prefers a plan that fills at most this share of the free memory. A forecast may be wrong by some percent."""


@dataclass
class Checkpointing(CheckpointingOptions, Technique):
    def check(self, facts: Facts) -> Iterator[str]:
        layers = Shape.of(facts.model).layers
        if self.every > layers:
            yield f"every: {self.every} must be at most the model's {layers} layers."
        if self.policy not in (Policy.selective, Policy.full) and self.every != 1:
            yield f"every: {self.every} is not read by policy={self.policy.value}. Set it to 1."
        read_by = {
            "save": (self.save, Policy.selective, "Empty it"),
            "recompute": (self.recompute, Policy.selective, "Empty it"),
            "mix": (self.mix, Policy.mix, "Empty it"),
            "budget": (self.budget != Checkpointing.budget, Policy.budget, "Leave it out"),
        }
        for option, (is_set, policy, change) in read_by.items():
            if is_set and self.policy is not policy:
                yield (
                    f"{option}: read only by policy={policy.value}, and policy is {self.policy.value}. {change}, or "
                    f"set policy={policy.value}."
                )
        if self.policy is Policy.selective:
            yield from self._check_names(facts)
        if self.policy is Policy.mix:
            yield from self._check_mix(layers)
        if self.policy is Policy.budget and not facts.techniques.compile.enabled:
            yield "policy: budget is the compiler's. Set techniques.compile.enabled=true, or use selective."
        if self.offload is not Offloaded.none:
            yield from self._check_offload(facts)
        if self.mlp_tiles != 1:
            yield from self._check_tiles(facts)

    def _check_names(self, facts: Facts) -> Iterator[str]:
        for name in sorted(set(self.save) & set(self.recompute)):
            yield f"recompute: {name} is in save, too. Remove it from one of the lists."
        layer = layer_of(facts.model)
        shapes = selective.linears(layer) if layer else {}
        known = [*GROUPS, *shapes, *selective.operators()]
        for option, names in (("save", self.save), ("recompute", self.recompute)):
            for name in names:
                if name not in known and (layer or "." in name):
                    yield (
                        f"{option}: {name} is no operator of torch, no group ({', '.join(GROUPS)}) and no linear of "
                        f"this model ({', '.join(shapes)}).{_did_you_mean(name, known)}"
                    )
        for name in self.recompute:
            same = sorted(other for other in self.save if name in shapes and shapes[name] == shapes.get(other))
            if same:
                yield (
                    f"recompute: {name} has the shape of {', '.join(same)} in save, {shapes[name]}, and products are "
                    "recognised by their shapes. Put both names in the same list."
                )

    def _check_mix(self, layers: int | None) -> Iterator[str]:
        for level in self.mix:
            if level not in LEVELS:
                yield f"mix: {level} is no level. Use {', '.join(LEVELS)}.{_did_you_mean(level, LEVELS)}"
        if any(count < 0 for count in self.mix.values()):
            yield f"mix: {min(self.mix.values())} layers are less than none. Use 0 or more."
        if not any(self.mix.values()):
            yield "mix: counts no layer. Give the number of layers of each level, such as {narrow: 12, wide: 20}."
        elif layers and sum(self.mix.values()) > layers:
            yield f"mix: counts {sum(self.mix.values())} layers, and the model has {layers}. Lower one of the numbers."
        tiled = [level for level in ("everything", "wide") if self.mix.get(level)]
        if self.mlp_tiles > 1 and tiled:
            yield (
                f"mix: mlp_tiles={self.mlp_tiles} keeps nothing of an MLP, so no layer can keep {' or '.join(tiled)}."
            )

    def _check_offload(self, facts: Facts) -> Iterator[str]:
        if self.policy in (Policy.none, Policy.budget):
            yield f"offload: policy={self.policy.value} keeps more on the device. Use full, selective or mix."
        if facts.device != "cuda":
            yield (
                f"offload: copies tensors from a GPU to host memory, and the device is {facts.device}. Set it to none."
            )
        if scope_of(facts) == "model":
            yield "offload: techniques.compile.scope=model is one graph, and nothing leaves a graph. Use scope=layers."
        if self.offload is Offloaded.kept and self.policy is Policy.full:
            yield "offload: kept, and policy=full keeps nothing but layers' inputs. Set it to inputs."
        if self.offload is Offloaded.kept and not facts.techniques.compile.enabled:
            yield "offload: kept is what compiled layers save. Use inputs, or techniques.compile.enabled=true."
        if self.policy is Policy.auto:
            return
        layers, plan = Shape.of(facts.model).layers, self.plan
        if not any(plan.sending(layers)):
            yield (
                f"offload: the last layer's input stays, and with {layers} layers and every={self.every} no other "
                "layer sends. Set it to none."
            )
        room, beside = host_for_activations(facts), " without the optimizer's moments" * (facts.optimizer.slots > 0)
        if facts.device == "cuda" and room and self._senders_that_fit(facts, plan) == 0:
            yield (
                f"offload: not one layer's tensors fit into {room / GIB:.1f} GiB, {HOST_SHARE:.0%} of the host's "
                f"memory{beside}. Set it to none, or shorten data.sequence_length."
            )

    def _senders_that_fit(self, facts: Facts, plan: RecomputePlan) -> int | None:
        """How many layers, from the first, may send tensors to the host's memory; None if all may."""
        return step_time.limit_senders(facts, plan, host_for_activations(facts))[0].senders

    def _check_tiles(self, facts: Facts) -> Iterator[str]:
        layer = layer_of(facts.model)
        mlp = getattr(layer, "mlp", None)
        if self.policy is Policy.budget:
            yield "mlp_tiles: policy=budget leaves the choice to the compiler. Set it to 1, or use selective or full."
        if self.every > 1:
            yield f"mlp_tiles: with every={self.every} the layers between would have no tiles. Set one of them to 1."
        if Shape.of(facts.model).expert_count > 1:
            yield "mlp_tiles: the experts of this model do not process each token alone. Set it to 1."
        elif layer is not None and mlp is None:
            yield "mlp_tiles: the layers of this model have no part named mlp. Set it to 1."
        if inside := sorted(set(self.save) & set(selective.linears(mlp) if mlp is not None else ())):
            yield f"mlp_tiles: tiles keep nothing of the MLP, and save names {', '.join(inside)}. Remove it there."

    def description(self) -> str:
        """What layers keep, in words for messages."""
        plan = self.plan
        if self.mix:
            counts = [(level, self.mix[level]) for level in LEVELS if self.mix.get(level)]
            parts = [
                " and ".join(f"{count} layer{'s keep' if count != 1 else ' keeps'} {level}" for level, count in counts)
            ]
        else:
            parts = [f"{'every layer' if self.every == 1 else f'one layer of {self.every}'} keeps {plan.level}"]
        if self.offload is not Offloaded.none:
            wide = " except gate and up" * ("wide" in [plan.level, *self.mix])
            what = "inputs" if self.offload is Offloaded.inputs else f"kept tensors{wide}"
            layers = "all layers but the last" if self.senders is None else f"the first {self.senders} layers"
            parts.append(f"{what} of {layers} in host memory")
        return ", ".join([*parts, *([f"MLPs in {self.mlp_tiles} tiles"] if self.mlp_tiles > 1 else [])])

    def resolve(self, facts: Facts) -> str | None:
        """For `auto`, choose the plan that fits and adds the least time. For others, choose how many layers send."""
        if self.policy is not Policy.auto:
            if self.offload is not Offloaded.none and self.senders is None:
                self.senders = self._senders_that_fit(facts, self.plan)
            return f"{self.description()}, as the host has room for" if self.senders is not None else None
        candidates = list(self._candidates(facts))
        host = host_for_activations(facts)
        with_margin = replace(facts, free_memory=int(MEMORY_SHARE * facts.free_memory))
        choice = step_time.fastest(with_margin, candidates, host) or step_time.fastest(facts, candidates, host)
        if choice is None:  # no plan fits by the forecast, which may be wrong: try the smallest plan
            smallest = [
                step_time.limit_senders(facts, replace(plan, level=levels[0]), host) for plan, levels in candidates
            ]
            fitting = ((plan, need) for plan, need in smallest if need.host <= host)
            plan, need = min(fitting, key=lambda pair: pair[1].device)
            self._adopt(plan, facts)
            return (
                f"{self.description()}: the smallest plan, and it needs some {_used(facts, need)}. It may run out of "
                "memory: shorten data.sequence_length, or quantize the base."
            )
        self._adopt(choice.plan, facts)
        everything = forecast(facts, RecomputePlan()).device
        slower = choice.overhead / choice.step if choice.step else 0.0  # 0 if fxtune does not know the sizes
        unlimited = "" if everything <= facts.free_memory else f"; everything would need {everything / GIB:.1f}"
        return (
            f"{self.description()}: {_used(facts, choice.need)}, an estimated {slower:.0%} "
            f"more time in the layers{unlimited}"
        )

    def describe(self, facts: Facts, execution: Execution) -> Execution:
        return replace(execution, recompute=self.plan)

    def _candidates(self, facts: Facts) -> Iterator[tuple[RecomputePlan, tuple[str, ...]]]:
        """Yield the plans that `auto` tries, with and without offload and tiles, and the levels that each plan allows.
        Options that the recipe sets stay."""
        can_send = facts.device == "cuda" and scope_of(facts) != "model" and Shape.of(facts.model).layers > 1
        all_kept = ["kept"] if facts.techniques.compile.enabled else []
        sent = ["", "inputs", *all_kept] if can_send else [""]
        if self.offload is not Offloaded.none:
            sent = [self.offload.value] if self.offload is Offloaded.kept else ["inputs", *all_kept]
        tiles = [self.mlp_tiles]
        if self.mlp_tiles == 1 and not list(replace(self, policy=Policy.full, mlp_tiles=TILES[0])._check_tiles(facts)):
            tiles += TILES
        layer = layer_of(facts.model)
        for tensors in sent:
            for count in tiles:
                # `narrow` names the wide products, so the MLP's linears must be known.
                impossible = {"narrow"} if layer is None or not _wide_linears(layer) else set()
                impossible |= {"wide", "everything"} if count > 1 else {"everything"} if tensors else set()
                levels = tuple(level for level in LEVELS if level not in impossible)
                yield RecomputePlan(sent=tensors, tiles=count), levels

    def _adopt(self, plan: RecomputePlan, facts: Facts) -> None:
        """Set the options that `plan` describes."""
        levels = [level for level, count in plan.mix if count] or [plan.level]
        self.mix = dict(plan.mix) if len(levels) > 1 else {}
        layer = layer_of(facts.model)
        uniform = self._uniform(levels[0], _wide_linears(layer) if layer is not None else {})
        self.policy = Policy.mix if self.mix else uniform.policy
        self.save, self.recompute = ([], []) if self.mix else (uniform.save, uniform.recompute)
        sends = any(plan.sending(Shape.of(facts.model).layers))
        sends_more = plan.sent == "kept" and levels != ["input"]
        self.offload = Offloaded.none if not sends else Offloaded.kept if sends_more else Offloaded.inputs
        self.senders = plan.senders if sends else None
        self.mlp_tiles, self.every = plan.tiles, 1

    def _uniform(self, level: str, wide: Iterable[str]) -> Checkpointing:
        """These options with one level for all layers. `wide`: the MLP's linears with an output that is wider than the
        input."""
        return replace(
            self,
            policy={"everything": Policy.none, "input": Policy.full}.get(level, Policy.selective),
            mix={},
            save=["attention"] if level == "attention" else [],
            recompute=list(wide) if level == "narrow" else [],
        )

    def apply(self, model: PreparedModel, world: World) -> None:
        layers = decoder_layers(model.module)
        by_level = self._by_level(layers)
        contexts = {
            level: options._rule(layers).contexts()
            for level, options in by_level.items()
            if options.policy is Policy.selective
        }
        plan = self.plan
        for layer, level in zip(layers, plan.levels(len(layers)), strict=True):
            by_level[level]._wrap(layer, contexts.get(level))
        if (encoder_options := self._of_vision_encoder(model.module)) is not None:
            # `save` and `recompute` match the names of the vision encoder's own linears.
            encoder, selects = encoder_layers(model.module), encoder_options.policy is Policy.selective
            rule = encoder_options._rule(encoder).contexts() if selects else None
            for layer in encoder:
                layer.forward = partial(_checkpointed, layer.forward, rule)
        if self.policy is Policy.budget:  # the compiler reads the budget when a layer first runs
            patch = upstream.with_activation_budget(self.budget)
            backbone(model.module).register_forward_pre_hook(lambda *_: patch.__enter__())
            backbone(model.module).register_forward_hook(lambda *_: patch.__exit__(None, None, None), always_call=True)
        if self.offload is not Offloaded.none:
            sending = plan.sending(len(layers))
            senders = [layer for layer, sends in zip(layers, sending, strict=True) if sends]
            # Offload needs the layer above the last sender, too: its backward pass starts to fetch the sender's
            # tensors.
            above = layers[len(sending) - sending[::-1].index(True)]
            wide = _wide_linears(layers[0]).values()
            sizes = frozenset([*wide, sum(wide)])
            all_saved, pieces = self.offload is Offloaded.kept, world.context_ranks
            model.offload = Offload([*senders, above], world.device, all_saved, sizes, pieces=pieces)

    def _of_vision_encoder(self, model: nn.Module) -> Checkpointing | None:
        """The options for the layers of the vision encoder; None if they keep everything, or are not trained."""
        layers = encoder_layers(model)
        if not any(weight.requires_grad for layer in layers for weight in layer.parameters()):
            return None
        least = next((level for level in LEVELS if self.mix.get(level)), "")
        options = self._uniform(least, ()) if least else self
        return replace(options, mlp_tiles=1) if options.policy in (Policy.selective, Policy.full) else None

    def _by_level(self, layers: list[nn.Module]) -> dict[str, Checkpointing]:
        """Level of RecomputePlan.levels() -> the options of the layers with this level."""
        wide = _wide_linears(layers[0])
        if self.mix:
            return {level: self._uniform(level, wide) for level in LEVELS}
        return {"everything": self._uniform("everything", wide), self.plan.level: self}

    def _wrap(self, layer: nn.Module, contexts: Any) -> None:
        """Apply these options to one layer."""
        recomputed = self.policy in (Policy.selective, Policy.full)
        for mlp in (module for module in layer.modules() if isinstance(module, FusedMlp)):
            wide, result = self._saved_of_fused_mlp()
            # If a norm reads the MLP's result (Gemma 2, Olmo 2), recomputing the layer runs the whole operator again.
            again = recomputed and not result and hasattr(layer, "post_feedforward_layernorm")
            mlp.tiles, mlp.keep = self.mlp_tiles, wide or again
            mlp.recomputed = recomputed and not result
        for experts in grouped(layer):
            # If a norm reads the experts' result, recomputing the layer runs their whole operator again, too.
            experts.keep = self._saves(operator_of(experts)) or hasattr(layer, "post_feedforward_layernorm")
        if self.mlp_tiles > 1 and not isinstance(layer.mlp, FusedMlp):
            layer.mlp = TiledMlp(layer.mlp, self.mlp_tiles, recomputed)  # type: ignore[arg-type]
        if recomputed:
            layer.forward = partial(_checkpointed, layer.forward, contexts)

    def _rule(self, layers: list[nn.Module]) -> Rule:
        """The rule for these layers that follows from `save`, `recompute` and `mlp_tiles`."""
        shapes = {name: shape for layer in layers for name, shape in selective.linears(layer).items()}
        tiled = selective.linears(layers[0].mlp) if self.mlp_tiles > 1 else {}  # type: ignore[arg-type]
        named = {name: name in self.save for name in [*self.save, *self.recompute] if name in shapes}
        named |= dict.fromkeys(tiled, False)
        saved = [name for name in self.save or GROUPS if name not in shapes]
        recomputed = [name for name in self.recompute if name not in shapes]
        rule = Rule(tuple(saved), tuple(recomputed), ranks=selective.ranks(layers[0]))
        groups = dict(fuse.group_sizes(layers[0]))
        linears: dict[tuple[int, int], bool] = {}
        for name, size in groups.items():  # one saved name saves all fused linears of its group
            linears[size] = linears.get(size, False) or named.get(name, rule.saves_by_name("fxtune.lora_linear"))
        linears |= {shapes[name]: saves for name, saves in named.items() if name not in groups}
        if any(isinstance(module, FusedMlp) for module in layers[0].modules()):
            (saved if self._saved_of_fused_mlp()[1] else recomputed).append("fxtune.lora_mlp")
        return rule._replace(
            saved=tuple(saved),
            recomputed=tuple(recomputed),
            linears=tuple((*size, saves) for size, saves in linears.items()),
        )

    def _saves(self, operator: str) -> bool:
        """Whether layers save the result of `operator`, an operator that stands for no single linear."""
        if self.policy is not Policy.selective:
            return self.policy is not Policy.full
        return Rule(tuple(self.save or GROUPS), tuple(self.recompute)).saves_by_name(operator)

    def _saved_of_fused_mlp(self) -> tuple[bool, bool]:
        """For an MLP that is one operator: whether gate and up are saved, and whether its result is saved."""
        if self.mlp_tiles > 1:
            return False, False
        by_name = self._saves("fxtune.lora_mlp")
        if self.policy is not Policy.selective:
            return by_name, by_name
        gate, up, down = (name in self.save or (by_name and name not in self.recompute) for name in families.MLP)
        return gate or up, gate or up or down

    def verify(self, model: PreparedModel, probe: dict[str, Any]) -> Iterator[Evidence]:
        """Count the operators that run once and twice in a forward and backward pass, and the bytes that autograd
        saves."""
        layers = decoder_layers(model.module)
        rules = {
            level: Rule(()) if options.policy is Policy.full else options._rule(layers)
            for level, options in self._by_level(layers).items()
        }
        recomputed = f"; recomputed: {', '.join(self.recompute)}" if self.recompute else ""
        description = {
            Policy.selective: f"kept: {', '.join(self.save or GROUPS)}{recomputed}",
            Policy.full: "attention and matmuls run again",
            Policy.budget: f"the compiler keeps {self.budget:.0%}",
            Policy.mix: self.description(),
            Policy.none: "nothing runs again",
        }[self.policy]
        yield from Proof(model, probe, self.plan, rules, [*self.save, *self.recompute]).evidence(description)
        if (options := self._of_vision_encoder(model.module)) is not None:
            in_encoder = encoder_layers(model.module)
            rule = Rule(()) if options.policy is Policy.full else options._rule(in_encoder)
            yield vision_encoder_evidence(model.module, in_encoder, rule)


def _checkpointed(forward: Callable[..., Any], contexts: Any, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():  # evaluation and generation save nothing
        return forward(*args, **kwargs)
    chosen = {} if contexts is None else {"context_fn": contexts}
    return checkpoint(forward, *args, use_reentrant=False, **chosen, **kwargs)


def layer_of(config: dict[str, Any]) -> nn.Module | None:
    """The first decoder layer without its weights, or None if only the model's own code can build it."""
    model = skeleton(config)
    return None if model is None else decoder_layers(model)[0]


def scope_of(facts: Facts) -> str:
    """The scope of techniques.compile: `layers` or `model`; empty if it is off."""
    compiler = facts.techniques.compile
    return compiler.scope.value if compiler.enabled else ""


def _wide_linears(layer: nn.Module) -> dict[str, int]:
    """Name -> width of the output, for the MLP's linears with an output that is wider than the input."""
    mlp = getattr(layer, "mlp", None)
    linears = selective.linears(mlp) if isinstance(mlp, nn.Module) else {}
    return {name: width for name, (width_in, width) in linears.items() if width > width_in}


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    close = nearest(name, known, 0.5)
    return f" Did you mean {close}?" if close else ""


def _used(facts: Facts, need: Need) -> str:
    host = f" and {need.pinned / GIB:.1f} GiB of host memory" if need.pinned else ""
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in need.parts.items())
    return f"{need.device / GIB:.1f} of {facts.free_memory / GIB:.1f} GiB free{host} ({parts})"
