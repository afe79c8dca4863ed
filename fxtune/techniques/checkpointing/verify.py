"""What proves that checkpointing acted: layers that run twice, operators that do not, and bytes kept and sent.

`Asked` says what each layer was to do; `evidence` runs the model on a small row, looks (count, kept_bytes), and compares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fxtune.models.structure import backbone, decoder_layers, observed
from fxtune.techniques.base import Evidence
from fxtune.techniques.checkpointing import policy
from fxtune.techniques.checkpointing.policy import Rule, group_of, name_of, weight_shape
from fxtune.techniques.lora import fuse, fused_modules


@dataclass
class Asked:
    """What the layers of a model were to keep, by layer, first to last."""

    told: str
    """In words."""
    levels: list[str]
    """`everything`: not checkpointed; `budget`: what the compiler picks; any other word: checkpointed."""
    rules: list[Rule]
    named: list[str] = field(default_factory=list)
    """Operators, groups and linears that must have run."""
    budget: float | None = None
    tiles: int = 1
    sending: list[bool] = field(default_factory=list)
    """Which layers send their input to the host."""
    sends_kept: bool = False
    """Whether they send what else they keep."""

    @property
    def repeated(self) -> list[bool]:
        return [level not in ("everything", "budget") for level in self.levels]


def evidence(model: nn.Module, asked: Asked, probe: dict[str, Any]) -> Iterator[Evidence]:
    """Run `model` on `probe` forward and backward, and say what was seen. See Technique.verify."""
    layers = decoder_layers(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad][:1]

    def forward() -> torch.Tensor:
        logits: torch.Tensor = model(**probe).logits
        return logits

    with observed(model):
        seen = count(layers, asked.rules, forward, lambda logits: torch.autograd.grad(logits.float().mean(), trained))
        if any(asked.repeated):
            yield _layers_ran(asked, layers, trained, seen)
        yield _operators_ran(asked, layers, seen)
        if any(asked.sending):
            yield from _sent(model, asked, probe, lambda: torch.autograd.grad(forward().float().mean(), trained))
        elif asked.budget is not None:
            yield _budget_given(model, asked.budget, layers, probe, forward)
        elif any(asked.repeated):
            yield from _bytes_kept(model, asked, layers, probe, forward, seen)
    if asked.tiles > 1:
        yield _tiled(asked.tiles, probe["input_ids"].numel(), seen)


def _layers_ran(asked: Asked, layers: list[nn.Module], trained: list[nn.Parameter], seen: Counts) -> Evidence:
    # Layers before the first trained parameter get no backward pass, so nothing is recomputed there.
    inside = [any(parameter.requires_grad for parameter in layer.parameters()) for layer in layers]
    owned = {id(parameter) for layer in layers for parameter in layer.parameters()}
    first = 0 if any(id(parameter) not in owned for parameter in trained) else inside.index(True)
    wanted = [1 + (repeated and index >= first) for index, repeated in enumerate(asked.repeated)]
    return Evidence(
        "checkpointing",
        f"{sum(asked.repeated)} of {len(layers)} layers recomputed",
        f"{sum(calls > 1 for calls in seen.first)} of {len(layers)} layers ran twice in one forward and backward",
        seen.first == wanted,
    )


def _operators_ran(asked: Asked, layers: list[nn.Module], seen: Counts) -> Evidence:
    """Nothing that is kept runs again, and everything that was named ran."""
    sizes, ranks = policy.linears(layers[0]) | dict(fuse.group_sizes(layers[0])), policy.ranks(layers[0])
    shapes = {shape: ", ".join(name for name in sizes if sizes[name] == shape) for shape in sizes.values()}
    totals: dict[str, list[int]] = {}
    for name, kind in seen.all():
        total = totals.setdefault(f"{name} ({shapes.get(kind.shape, 'adapters')})" if kind.shape else name, [0, 0])
        total[0] += kind.forward
        total[1] += kind.again
    told = ", ".join(f"{name} {ahead}+{again}" for name, (ahead, again) in totals.items())
    twice = any(kind.again for _, kind in seen.all())
    # Tiles repeat the MLP's adapters, too, which have the shapes of attention's.
    tiled = {kind.shape for _, kind in seen.all() if asked.tiles > 1 and kind.shape and kind.shape[1] in ranks}
    wrong = [name for name, kind in seen.all() if kind.kept and kind.again and kind.shape not in tiled]
    inside = fuse.MLP if any(map(fuse.is_fused_mlp, layers[0].modules())) else ()
    missing = [
        name
        for name in asked.named
        if not any(
            name in (operator, policy.INSIDE.get(operator), kind.group)
            or kind.shape == sizes.get(name, ())
            or (name in inside and operator == "fxtune.lora_mlp")
            for operator, kind in seen.all()
        )
    ]
    note = f"; never ran: {', '.join(missing)}" if missing else ""
    return Evidence(
        "checkpointing",
        asked.told,
        f"runs forward + again: {told or 'none'}{note}",
        not wrong and not missing and (twice or "input" not in asked.levels),
    )


def _bytes_kept(
    model: nn.Module,
    asked: Asked,
    layers: list[nn.Module],
    probe: dict[str, Any],
    forward: Callable[[], Any],
    seen: Counts,
) -> Iterator[Evidence]:
    """What autograd keeps of the layers, compiled ones as they are compiled, against what the rules leave it."""
    everything, arguments, kept, one_graph = _bytes(model, layers, probe, forward)
    each = probe["input_ids"].numel() * len(layers)
    inputs = arguments * (len(layers) + 4 * one_graph)  # the last norm's is in the graph, too
    if set(asked.levels) - {"input"} and kept == everything:
        return  # layers that are not compiled: torch's policy keeps what it keeps where these hooks do not see it
    allowed = (
        inputs + sum(kind.bytes for _, kind in seen.all() if kind.kept) + everything * ("everything" in asked.levels)
    )
    yield Evidence(
        "checkpointing",
        f"at most {allowed / each:,.0f} bytes a token and layer kept for the backward pass",
        f"{kept / each:,.0f} bytes",
        kept <= allowed,
    )


def _budget_given(
    model: nn.Module, budget: float, layers: list[nn.Module], probe: dict[str, Any], forward: Callable[[], Any]
) -> Evidence:
    """Of a row as short as the probe most is weights to the compiler, so what it keeps of this one proves little."""
    everything, _, kept, one_graph = _bytes(model, layers, probe, forward)
    each = probe["input_ids"].numel() * len(layers)
    given: list[float] = []
    hook = (backbone(model) if one_graph else layers[0]).register_forward_pre_hook(
        lambda *_: given.append(torch._functorch.config.activation_memory_budget)
    )
    forward()
    hook.remove()
    return Evidence(
        "checkpointing",
        f"a budget of {budget:g} for the compiler",
        f"{given[-1]:g} while layers run; {kept / each:,.0f} of {everything / each:,.0f} bytes a token and "
        "layer of the probe kept",
        given[-1] == budget,
    )


def _bytes(
    model: nn.Module, layers: list[nn.Module], probe: dict[str, Any], forward: Callable[[], Any]
) -> tuple[int, int, int, bool]:
    """Kept without compiled code; one layer's arguments; kept as it runs; and whether all layers are one graph."""
    tokens = probe["input_ids"].numel()
    with torch.compiler.set_stance("force_eager"):
        everything, arguments = kept_bytes(model, layers, tokens, forward)
    whole = backbone(model)
    one_graph = "forward" in vars(whole)  # techniques.compile.scope=model: no hook may stand between its layers
    kept, _ = kept_bytes(model, [whole] if one_graph else layers, tokens, forward)
    return everything, arguments, kept, one_graph


def _sent(model: Any, asked: Asked, probe: dict[str, Any], step: Callable[[], Any]) -> Iterator[Evidence]:
    offload, wanted = getattr(model, "offload", None), sum(asked.sending)
    before, least = (offload.stored, offload.fetched, offload.sent) if offload else (0, 0, 0), 0
    if offload:
        least, offload.least = offload.least, 0  # the probe's tensors are small
    with torch.enable_grad():
        step()
    after = (offload.stored, offload.fetched, offload.sent) if offload else (0, 0, 0)
    if offload:
        offload.least = least
    stored, fetched, size = (now - then for now, then in zip(after, before, strict=True))
    yield Evidence(
        "checkpointing",
        f"the inputs of {wanted} layers wait in host memory",
        f"{stored} sent there and {fetched} brought back in one forward and backward",
        stored == fetched == wanted,
    )
    if asked.sends_kept:
        each = wanted * probe["input_ids"].numel()
        config = model.config.get_text_config()
        inputs = config.hidden_size * next(model.parameters()).element_size()
        yield Evidence(
            "checkpointing",
            f"and so does what else they keep: more than {inputs:,} bytes a token and layer",
            f"{size / each:,.0f} bytes",
            size / each > inputs,
        )


def _tiled(tiles: int, tokens: int, seen: Counts) -> Evidence:
    pieces = -(-tokens // -(-tokens // tiles))
    found = sorted({tuple(calls) for calls in seen.tiles})
    told = " or ".join(f"{ahead} forward and {back} again" for ahead, back in found)
    # Twice where the layer does more after its MLP (Gemma 2's norm), so that recomputing it goes through.
    fits = all(ahead == pieces and back in (0, pieces, 2 * pieces) for ahead, back in found)
    return Evidence(
        "checkpointing",
        f"each MLP in {pieces} tiles (of the probe's {tokens} tokens)",
        told,
        fits and any(back for _, back in found),
    )


@dataclass
class Seen:
    """One kind of operator in one layer."""

    group: str
    shape: tuple[int, int] | None
    """(in, out) of a product's second operand."""
    kept: bool
    """What the rule says of it."""
    forward: int = 0
    again: int = 0
    bytes: int = 0
    """Of its results in the forward pass."""


@dataclass
class Counts:
    """By layer, and there by operator and shape: what ran."""

    operators: list[dict[tuple[str, Any], Seen]]
    first: list[int]
    """Calls of what ran first in each layer: a norm, a linear."""
    tiles: list[list[int]] = field(default_factory=list)
    """Calls of the first linear of each layer's MLP, or tiles of it where it is one operator: forward, backward."""

    def all(self) -> list[tuple[str, Seen]]:
        return [(name, seen) for layer in self.operators for (name, _), seen in layer.items()]


def count(
    layers: list[nn.Module], rules: list[Rule], forward: Callable[[], Any], backward: Callable[[Any], Any]
) -> Counts:
    """Run `backward(forward())` with compiled code switched off, and count attention and products of `layers`.

    `rules`: each layer's.
    """
    mode = _Count(rules)
    hooks = []
    for index, layer in enumerate(layers):
        uncalled = {
            id(part) for module in layer.modules() for part in fused_modules.bypassed(module)
        }  # a hook would part them
        inner = [module for module in layer.modules() if module is not layer and id(module) not in uncalled]
        for module in inner:
            hooks.append(module.register_forward_pre_hook(partial(mode.enter, index)))
            hooks.append(module.register_forward_hook(mode.leave, always_call=True))
        hooks += [
            module.register_forward_pre_hook(partial(mode.first, index))
            for module in inner
            if not list(module.children())
        ]
        mlp = getattr(layer, "mlp", None)
        if isinstance(mlp, nn.Module) and getattr(mlp, "fused", None) != "mlp":  # that one counts its tiles itself
            hooks.append(next(mlp.children(), mlp).register_forward_pre_hook(partial(mode.tile, index)))
    try:
        with torch.enable_grad(), torch.compiler.set_stance("force_eager"), mode:
            result = forward()
            mode.backward = True
            backward(result)
    finally:
        for hook in hooks:
            hook.remove()
    return mode.counts


class _Count(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, rules: list[Rule]) -> None:
        super().__init__()
        self.rules, self.backward, self.inside = rules, False, []  # type: tuple[list[Rule], bool, list[int]]
        self.leaves: dict[int, nn.Module] = {}
        self.owners: dict[int, int] = {}
        """Layers by the place of their MLP's weights: a backward pass runs in no module."""
        self.counts = Counts([{} for _ in rules], [0] * len(rules), [[0, 0] for _ in rules])

    def enter(self, index: int, *_: Any) -> None:
        self.inside.append(index)

    def leave(self, *_: Any) -> None:
        self.inside.pop()

    def first(self, index: int, leaf: nn.Module, *_: Any) -> None:
        self.counts.first[index] += self.leaves.setdefault(index, leaf) is leaf

    def tile(self, index: int, *_: Any) -> None:
        self.counts.tiles[index][self.backward] += 1

    def fused(self, weights: list[torch.Tensor], rows: torch.Tensor, tiles: int) -> None:
        """A whole MLP ran, forward or backward, in so many tiles of these rows."""
        index = self.owners.setdefault(weights[0].data_ptr(), self.inside[-1] if self.inside else -1)
        self.counts.tiles[index][self.backward] += -(-len(rows) // -(-len(rows) // tiles))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = name_of(func)
        if name.startswith("fxtune.lora_mlp"):
            self.fused(args[7] if name.endswith("backward") else args[3], args[0], args[-2])
        group = group_of(name)
        if group is not None and self.inside:
            shape = weight_shape(name, args) if group == "matmuls" else None
            index = self.inside[-1]
            kinds = self.counts.operators[index]
            seen = kinds.setdefault((name, shape), Seen(group, shape, self.rules[index].keeps(name, args)))
            if self.backward:
                seen.again += 1
            else:
                seen.forward += 1
                results = result if isinstance(result, (tuple, list)) else [result]
                seen.bytes += sum(one.numel() * one.element_size() for one in results if isinstance(one, torch.Tensor))
        return result


def kept_bytes(model: nn.Module, layers: list[nn.Module], tokens: int, forward: Callable[[], Any]) -> tuple[int, int]:
    """Bytes that autograd keeps of all layers' forward pass, compiled or not, in tensors with an axis of `tokens`; and the
    bytes of one layer's arguments. Parameters do not count, and what several layers keep counts once.
    """
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    found: dict[int, int] = {}
    inside: list[nn.Module] = []
    arguments = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        at = tensor.untyped_storage().data_ptr()
        if inside and tokens in tensor.shape and at not in weights:
            found[at] = max(found.get(at, 0), tensor.numel() * tensor.element_size())
        # The tensor itself, where it is its operator's own result, would hold that operator, which holds this: a ring that
        # nobody collects, and with it the graph, its checkpoints and the model.
        return tensor.detach()

    def enter(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal arguments
        inside.append(layer)
        arguments = sum(
            one.numel() * one.element_size() for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)
        )

    hooks = [layer.register_forward_pre_hook(enter, with_kwargs=True) for layer in layers]
    hooks += [layer.register_forward_hook(lambda *_: inside.clear(), always_call=True) for layer in layers]
    try:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            result = forward()  # held, so that no storage is used twice
            del result
    finally:
        for hook in hooks:
            hook.remove()
    return sum(found.values()), arguments
