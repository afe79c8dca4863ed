"""Activation checkpointing: compute again in the backward pass what one does not want to keep until then.

A layer keeps for its backward pass 139 KB a token (Llama-3-8B, LoRA, compiled). What else it can do, from fast to small:

    selective   94 KB   keeps the results of matmuls and attention and repeats what lies between them, a few percent of the time;
                37 KB   with `recompute: [gate_proj, up_proj]`, the widest ones, half of the layer's matmuls
                16 KB   with `save: [attention]`, which is two thirds of a layer's time at 64k tokens
    full         8 KB   keeps the layer's input and repeats all of it: a third more time
    + offload    0 KB   and that input waits in host memory (kernels/offload.py): no more time where a layer computes for longer
                        than its input travels, from some thousand tokens on
    + mlp_tiles         the MLP a part of the sequence at a time (kernels/tiled.py): what one layer holds while it computes falls
                        from 385 KB a token to 134
    budget              the compiler picks what to keep, up to a share of what it would
    auto                the first of these that fits the memory that is free, by the arithmetic of fxtune/memory.py

Layers are wrapped here, not by transformers' own switch: that one changed its name and its meaning within the versions we
serve, acts only in training mode, and needs care with frozen embeddings. The non-reentrant form of torch needs no input
that requires a gradient, keeps the random state (so dropout repeats itself in the recomputation) and stops recomputing as
soon as it has what the backward pass needs. Under torch.compile the same wrapper is traced, and the compiler, which sees
forward and backward at once, leaves out of both whatever nobody needs.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fxtune import adapted
from fxtune.kernels import selective
from fxtune.kernels.offload import Offload
from fxtune.kernels.selective import GROUPS, Rule
from fxtune.kernels.tiled import tile
from fxtune.memory import Keeping, Need, forecast
from fxtune.recount import Counts, count, kept_bytes
from fxtune.technique import Evidence, Technique, backbone, decoder_layers, observed, skeleton
from fxtune.world import Facts, World

GIB = 1 << 30
TILES = (4, 16)
"""What `auto` tries for mlp_tiles."""
LONG_TILE = 4096
"""Tokens in a tile whose matmuls run as fast as those of the whole row."""
SELECTIVE = {"narrow": "selective", "attention": "selective"}
"""The policies of what memory.forecast() tells apart."""
HOST_SHARE = 0.8
"""Of the host's memory, what offloaded inputs may fill."""


class Policy(str, Enum):
    none = "none"
    selective = "selective"
    full = "full"
    budget = "budget"
    auto = "auto"


@dataclass
class Checkpointing(Technique):
    policy: Policy = Policy.full
    """What layers keep for the backward pass. `none`: everything; `selective`: what `save` and `recompute` say; `full`: their
    input; `budget`: what the compiler picks; `auto`: the fastest of these that fits, with `offload` and `mlp_tiles` where it
    needs them."""
    every: int = 1
    """Treat one decoder layer in this many: 1 is all of them, 2 every other one. Of the policies selective and full."""
    save: list[str] = field(default_factory=list)
    """policy=selective: whose results are kept: operators (`aten.mm`), groups (`attention`, `matmuls`), linears of a layer
    (`q_proj`). Empty: both groups. A linear's name decides over its operator's, that over its group's."""
    recompute: list[str] = field(default_factory=list)
    """policy=selective: exceptions from `save`, in the same words: [gate_proj, up_proj] keeps what is left of `matmuls`."""
    budget: float = 0.5
    """policy=budget: which share of what the compiler would keep it may keep. 0: layers' inputs only; 1: all it would."""
    offload: bool = False
    """Keep layers' inputs in pinned host memory from forward to backward, in time with the computation (needs a GPU)."""
    mlp_tiles: int = 1
    """Run each MLP in this many tiles of the sequence and recompute them one by one; 1: whole."""

    def check(self, facts: Facts) -> Iterator[str]:
        layers = facts.text.get("num_hidden_layers")
        if self.every < 1 or (layers and self.every > layers):
            yield f"every: {self.every} must be at least 1 and at most the model's {layers or ''} layers."
        if self.policy not in (Policy.selective, Policy.full, Policy.auto) and self.every != 1:
            yield f"every: {self.every} is not read by policy={self.policy.value}. Set it to 1."
        if self.policy is not Policy.selective and (self.save or self.recompute):
            yield (f"{'save' if self.save else 'recompute'}: read by policy=selective alone, and policy is "
                   f"{self.policy.value}. Empty it, or set policy=selective.")
        elif self.save or self.recompute:
            yield from self._names(facts)
        if self.policy is Policy.budget:
            if not 0 <= self.budget <= 1:
                yield f"budget: {self.budget} must be from 0 to 1."
            if "compile" not in facts.techniques:
                yield "policy: budget is the compiler's, and techniques.compile.enabled=false. Set it to true, or use selective."
        if self.offload:
            yield from self._offloads(facts)
        if self.mlp_tiles != 1:
            yield from self._tiles(facts)

    def _names(self, facts: Facts) -> Iterator[str]:
        """What is wrong with `save` and `recompute`."""
        for name in sorted(set(self.save) & set(self.recompute)):
            yield f"recompute: {name} stands in save, too. Take it out of one of them."
        layer = _layer(facts.model)
        shapes = selective.linears(layer) if layer else {}
        known = [*GROUPS, *shapes, *selective.operators()]
        for option, names in (("save", self.save), ("recompute", self.recompute)):
            for name in names:
                if name not in known and (layer or "." in name):
                    close = difflib.get_close_matches(name, known, 1, 0.5)
                    hint = f" Did you mean {close[0]}?" if close else ""
                    yield (f"{option}: {name} is no operator that torch knows, no group ({', '.join(GROUPS)}) and no linear of "
                           f"this model ({', '.join(shapes)}).{hint}")
        for name in self.recompute:
            twins = sorted(other for other in self.save if name in shapes and shapes[name] == shapes.get(other))
            if twins:
                yield (f"recompute: {name} has the shape of {', '.join(twins)} in save, {shapes[name]}, and products are told "
                       "apart by their shape. Put them in the same list.")

    def _offloads(self, facts: Facts) -> Iterator[str]:
        if self.policy in (Policy.none, Policy.budget):
            yield (f"offload: policy={self.policy.value} keeps more than layers' inputs on the device, so little would be won. "
                   "Use full or selective, or set it to false.")
        if facts.device != "cuda":
            yield f"offload: brings tensors from a GPU to host memory, and this runs on {facts.device}. Set it to false."
        if _scope(facts) == "model":
            yield ("offload: techniques.compile.scope=model makes one graph of all layers, with no place between them. Use "
                   "scope=layers.")
        layers = facts.text.get("num_hidden_layers")
        if layers and -(-layers // self.every) < 2:
            yield (f"offload: the last layer's input stays, and with {layers} layers and every={self.every} there is no other. "
                   "Set it to false.")
        need = forecast(facts, self.keeping()).host
        if facts.device == "cuda" and need > HOST_SHARE * facts.host_memory:
            yield (f"offload: the inputs of {facts.text.get('num_hidden_layers')} layers take {need / GIB:.1f} GiB of host "
                   f"memory, and {HOST_SHARE:.0%} of this machine's is {HOST_SHARE * facts.host_memory / GIB:.1f}. Set it to "
                   "false, or shorten data.sequence_length.")

    def _tiles(self, facts: Facts) -> Iterator[str]:
        layer = _layer(facts.model)
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

    def resolve(self, facts: Facts) -> str | None:
        """For `auto`: try from fast to small what memory.forecast() says of each."""
        if self.policy is not Policy.auto:
            return None
        said, needs = [], []
        for name, keeping in self._candidates(facts):
            need = forecast(facts, keeping)
            needs.append((need.device, name, keeping, need))
            if need.device <= facts.free_memory:
                break
            said.append(f"{name} would need {need.device / GIB:.1f}")
        else:  # nothing fits by the forecast, which may be wrong by some percent: the smallest is tried
            needs.append(min(needs, key=lambda entry: entry[0]))
        _, name, keeping, need = needs[-1]
        self.policy = Policy(SELECTIVE.get(keeping.policy, keeping.policy))
        self.offload, self.mlp_tiles, self.every = keeping.offload, keeping.tiles, keeping.every
        self.save = ["attention"] if keeping.policy == "attention" else []
        self.recompute = _wide(facts) if keeping.policy == "narrow" else []
        free, host = f"{facts.free_memory / GIB:.1f}", f" and {need.host / GIB:.1f} GiB of host memory" if need.host else ""
        if need.device > facts.free_memory:
            return (f"{name}: the smallest there is, and it needs some {need.device / GIB:.1f} GiB{host} where {free} are free "
                    f"({_shares(need)}). It may run out of memory: shorten data.sequence_length, or quantise the base.")
        return f"{name}: {need.device / GIB:.1f} of {free} GiB free{host} ({_shares(need)}){'; ' * bool(said)}{', '.join(said)}"

    def _candidates(self, facts: Facts) -> Iterator[tuple[str, Keeping]]:
        """What `auto` may become, from fast to small. `every` stays, and so do offload and mlp_tiles where they are asked for.

        The dearest that can be kept is attention, two thirds of a layer's time at 64k tokens; sending inputs to the host and
        tiling the MLP cost little where they are needed.
        """
        wide, whole = _wide(facts), replace(self, policy=Policy.full)
        names = {"none": "none", "selective": "selective", "narrow": f"selective, {' and '.join(wide)} recomputed",
                 "attention": "selective, attention alone kept", "full": "full"}
        several = -(-(facts.text.get("num_hidden_layers") or 2) // self.every) > 1
        fits = facts.device == "cuda" and _scope(facts) != "model" and several and (
            forecast(facts, Keeping("full", every=self.every, offload=True)).host <= HOST_SHARE * facts.host_memory)
        sent = [True] if self.offload else [False, True] if fits else [False]
        tokens = facts.micro_batch_size * max(facts.rows, default=facts.sequence_length)
        more = [] if self.mlp_tiles > 1 or list(replace(whole, mlp_tiles=TILES[0])._tiles(facts)) else list(TILES)
        for policy, name in names.items():
            if (policy == "narrow" and not wide) or (policy in ("none", "selective") and (self.offload or self.mlp_tiles > 1)):
                continue
            inputs = [False] if policy in ("none", "selective") else sent
            ways = [(offload, self.mlp_tiles) for offload in inputs]
            if policy in ("attention", "full"):
                ways += [(inputs[-1], tiles) for tiles in more if policy == "full" or tokens >= tiles * LONG_TILE]
            for offload, tiles in ways:
                yield (name + " + offload" * offload + f" + mlp_tiles={tiles}" * (tiles > 1),
                       Keeping(policy, 1 if policy == "none" else self.every, 1.0, offload, tiles))

    def keeping(self) -> Keeping:
        """These options as memory.forecast() takes them."""
        policy = "full" if self.policy is Policy.auto else self.policy.value
        if self.policy is Policy.selective:
            policy = "attention" if self.save == ["attention"] else "narrow" if self.recompute else policy
        return Keeping(policy, self.every, self.budget, self.offload, self.mlp_tiles)

    def apply(self, model: nn.Module, world: World) -> nn.Module:
        treated = decoder_layers(model)[:: self.every]
        repeated = self.policy in (Policy.selective, Policy.full)
        contexts = self._rule(treated).contexts() if self.policy is Policy.selective else None
        for layer in treated:
            for mlp in filter(adapted.fused_mlp, layer.modules()):
                wide, whole = self._of_fused_mlp()
                # Where a norm reads the MLP's result (Gemma 2, Olmo 2), recomputing the layer runs all of the operator again.
                again = repeated and not whole and hasattr(layer, "post_feedforward_layernorm")
                mlp.tiles, mlp.keep, mlp.recomputed = self.mlp_tiles, wide or again, repeated and not whole  # type: ignore
            if self.mlp_tiles > 1 and not adapted.fused_mlp(layer.mlp):
                tile(layer.mlp, self.mlp_tiles, repeated)  # type: ignore[arg-type]
            if repeated:
                layer.forward = partial(_checkpointed, layer.forward, contexts)
        if self.policy is Policy.budget:
            # Around the model as it is called in training and in a test, since the compiler reads this when a layer first runs.
            base = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
            for module in {id(one): one for one in (model, base, backbone(model))}.values():
                _Budget(self.budget).around(module)
        if self.offload:
            model.offload = Offload(treated, world.device)  # type: ignore[assignment]
        return model

    def _rule(self, layers: list[nn.Module]) -> Rule:
        """What `save`, `recompute` and `mlp_tiles` come to, for layers as they are."""
        shapes = {name: shape for layer in layers for name, shape in selective.linears(layer).items()}
        tiled = selective.linears(layers[0].mlp) if self.mlp_tiles > 1 else {}  # type: ignore[arg-type]
        named = {name: name in self.save for name in [*self.save, *self.recompute] if name in shapes}
        named |= dict.fromkeys(tiled, False)
        saved, recomputed = ([name for name in names if name not in shapes] for names in (self.save or GROUPS, self.recompute))
        rule = Rule(tuple(saved), tuple(recomputed), ranks=selective.ranks(layers[0]))
        groups, kept = dict(adapted.groups_of(layers[0])), {}  # type: tuple[dict[str, tuple[int, int]], dict[tuple[int, int], bool]]
        for name, size in groups.items():  # fused linears are kept together, if one of them is
            kept[size] = kept.get(size, False) or named.get(name, rule.keeps_all("fxtune.lora_linear"))
        kept |= {shapes[name]: keeps for name, keeps in named.items() if name not in groups}
        if any(map(adapted.fused_mlp, layers[0].modules())):
            (saved if self._of_fused_mlp()[1] else recomputed).append("fxtune.lora_mlp")
        return rule._replace(saved=tuple(saved), recomputed=tuple(recomputed),
                             linears=tuple((*size, keeps) for size, keeps in kept.items()))

    def _of_fused_mlp(self) -> tuple[bool, bool]:
        """Of an MLP that is one operator: whether gate and up are kept, and whether its result is."""
        if self.mlp_tiles > 1 or self.policy is Policy.full:
            return False, False
        if self.policy is not Policy.selective:
            return True, True
        other = Rule(tuple(self.save or GROUPS), tuple(self.recompute)).keeps_all("fxtune.lora_mlp")
        gate, up, down = (name in self.save or (other and name not in self.recompute) for name in adapted.MLP)
        return gate or up, gate or up or down

    def verify(self, model: nn.Module, probe: dict[str, Any]) -> Iterator[Evidence]:
        """Count what runs once and twice in one forward and backward, and look at what autograd keeps in between."""
        layers = decoder_layers(model)
        rule = Rule(()) if self.policy is Policy.full else self._rule(layers)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad][:1]

        def forward() -> torch.Tensor:
            logits: torch.Tensor = model(**probe).logits
            return logits

        with observed(model):
            seen = count(layers, rule, forward, lambda logits: torch.autograd.grad(logits.float().mean(), trained))
            if self.policy in (Policy.selective, Policy.full):
                yield self._layers_ran(layers, trained, seen)
            yield self._operators_ran(layers, seen)
            if self.policy is not Policy.none and not self.offload:
                yield from self._bytes_kept(model, layers, probe, forward, seen)
            if self.offload:
                yield self._sent(model, layers, lambda: torch.autograd.grad(forward().float().mean(), trained))
        if self.mlp_tiles > 1:
            tokens = probe["input_ids"].numel()
            pieces = -(-tokens // -(-tokens // self.mlp_tiles))
            tiles = sorted({tuple(calls) for calls in seen.tiles})
            told = " or ".join(f"{ahead} forward and {back} again" for ahead, back in tiles)
            # Twice where the layer does more after its MLP (Gemma 2's norm), so that recomputing it goes through.
            fits = all(ahead == pieces and back in (0, pieces, 2 * pieces) for ahead, back in tiles)
            yield Evidence("checkpointing", f"each MLP in {pieces} tiles (of the probe's {tokens} tokens)", told,
                           fits and any(back for _, back in tiles))

    def _layers_ran(self, layers: list[nn.Module], trained: list[nn.Parameter], seen: Counts) -> Evidence:
        # Layers before the first trained parameter get no backward pass, so nothing is recomputed there.
        inside = [any(parameter.requires_grad for parameter in layer.parameters()) for layer in layers]
        owned = {id(parameter) for layer in layers for parameter in layer.parameters()}
        first = 0 if any(id(parameter) not in owned for parameter in trained) else inside.index(True)
        wanted = [1 + (index % self.every == 0 and index >= first) for index in range(len(layers))]
        return Evidence("checkpointing", f"{len(layers[:: self.every])} of {len(layers)} layers recomputed",
                        f"{sum(calls > 1 for calls in seen.first)} of {len(layers)} layers ran twice in one forward and backward",
                        seen.first == wanted)

    def _operators_ran(self, layers: list[nn.Module], seen: Counts) -> Evidence:
        """Nothing that is kept runs again, and everything that was named ran."""
        sizes, ranks = selective.linears(layers[0]) | dict(adapted.groups_of(layers[0])), selective.ranks(layers[0])
        shapes = {shape: ", ".join(name for name in sizes if sizes[name] == shape) for shape in sizes.values()}
        asked = {Policy.selective: f"kept: {', '.join(self.save or GROUPS)}"
                 + (f"; recomputed: {', '.join(self.recompute)}" if self.recompute else ""),
                 Policy.full: "attention and matmuls run again", Policy.budget: f"the compiler keeps {self.budget:.0%}",
                 Policy.none: "nothing runs again"}[self.policy]
        totals: dict[str, list[int]] = {}
        for name, kind in seen.all():
            total = totals.setdefault(f"{name} ({shapes.get(kind.shape, 'adapters')})" if kind.shape else name, [0, 0])
            total[0] += kind.forward
            total[1] += kind.again
        told = ", ".join(f"{name} {ahead}+{again}" for name, (ahead, again) in totals.items())
        twice = any(kind.again for _, kind in seen.all())
        # Tiles repeat the MLP's adapters, too, which have the shapes of attention's.
        tiled = {kind.shape for _, kind in seen.all() if self.mlp_tiles > 1 and kind.shape and kind.shape[1] in ranks}
        wrong = [name for name, kind in seen.all() if kind.kept and kind.again and kind.shape not in tiled]
        inside = adapted.MLP if any(map(adapted.fused_mlp, layers[0].modules())) else ()
        missing = [name for name in [*self.save, *self.recompute] if not any(
            name in (operator, kind.group) or kind.shape == sizes.get(name, ())
            or (name in inside and operator == "fxtune.lora_mlp") for operator, kind in seen.all())]
        note = f"; never ran: {', '.join(missing)}" if missing else ""
        return Evidence("checkpointing", asked, f"runs forward + again: {told or 'none'}{note}",
                        not wrong and not missing and (twice or self.policy is not Policy.full))

    def _bytes_kept(self, model: nn.Module, layers: list[nn.Module], probe: dict[str, Any], forward: Callable[[], Any],
                    seen: Counts) -> Iterator[Evidence]:
        """What autograd keeps of the layers, compiled ones as they are compiled, against what the policy leaves it."""
        tokens = probe["input_ids"].numel()
        with torch.compiler.set_stance("force_eager"):
            everything, arguments = kept_bytes(model, layers, tokens, forward)
        whole = backbone(model)
        one_graph = "forward" in vars(whole)  # techniques.compile.scope=model: no hook may stand between its layers
        kept, _ = kept_bytes(model, [whole] if one_graph else layers, tokens, forward)
        each, inputs = tokens * len(layers), arguments * (len(layers) + 4 * one_graph)  # the last norm's is in the graph, too
        allowed = inputs + sum(kind.bytes for _, kind in seen.all() if kind.kept)
        if self.policy is Policy.budget:
            # Of a row as short as the probe most is weights to the compiler, so what it keeps of this one proves little.
            given: list[float] = []
            hook = (whole if one_graph else layers[0]).register_forward_pre_hook(
                lambda *_: given.append(torch._functorch.config.activation_memory_budget))
            forward()
            hook.remove()
            yield Evidence("checkpointing", f"a budget of {self.budget:g} for the compiler",
                            f"{given[-1]:g} while layers run; {kept / each:,.0f} of {everything / each:,.0f} bytes a token and "
                            "layer of the probe kept", given[-1] == self.budget)
            return
        if self.policy is Policy.selective and kept == everything:
            return  # layers that are not compiled: torch's policy keeps what it keeps where these hooks do not see it
        if self.every > 1:
            allowed += everything
        yield Evidence("checkpointing", f"at most {allowed / each:,.0f} bytes a token and layer kept for the backward pass",
                       f"{kept / each:,.0f} bytes", kept <= allowed)

    def _sent(self, model: Any, layers: list[nn.Module], step: Callable[[], Any]) -> Evidence:
        offload = getattr(model, "offload", None)
        wanted = len(layers[:: self.every]) - 1
        before = (offload.stored, offload.fetched) if offload else (0, 0)
        with torch.enable_grad():
            step()
        seen = (offload.stored - before[0], offload.fetched - before[1]) if offload else (0, 0)
        return Evidence("checkpointing", f"the inputs of {wanted} layers wait in host memory",
                        f"{seen[0]} sent there and {seen[1]} brought back in one forward and backward", seen == (wanted, wanted))


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


def _layer(config: dict[str, Any]) -> nn.Module | None:
    """The first decoder layer of this model without its weights, or None where only the author's own code can build it."""
    model = skeleton(config)
    return None if model is None else decoder_layers(model)[0]


def _scope(facts: Facts) -> str:
    """What techniques.compile makes a graph of: layers, model, or nothing."""
    scope = facts.techniques.get("compile", {}).get("scope", "")
    return str(getattr(scope, "value", scope))


def _wide(facts: Facts) -> list[str]:
    """The linears of the MLP that are wider than what goes in."""
    mlp = getattr(_layer(facts.model), "mlp", None)
    return [name for name, (inward, outward) in selective.linears(mlp).items() if outward > inward] if mlp is not None else []


def _shares(need: Need) -> str:
    return (f"weights {need.weights / GIB:.1f}, gradients and optimizer {need.trained / GIB:.1f}, kept by the layers "
            f"{need.kept / GIB:.1f}, one layer at work {max(need.layer, need.loss) / GIB:.1f}")
