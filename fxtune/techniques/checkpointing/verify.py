"""Evidence that checkpointing acted: layers that ran twice, operators that ran once, bytes that were saved and sent.

`evidence` runs the model on a small row and compares what it observes with `Expected`.

`count` counts operators below autograd with a dispatch mode, in layers that run operator by operator. An operator of
the backward pass that runs inside the call of some part of a layer (its norm, its attention, one of its linears) is a
recomputation: gradients are computed outside of all parts. `saved_bytes` counts what autograd stores, which works for
compiled layers, too.
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
class Expected:
    """The behaviour that is expected of a model's layers. Lists have an entry for each layer, first to last."""

    description: str
    levels: list[str]
    """`everything`: not checkpointed; `budget`: the compiler's choice; any other: checkpointed."""
    rules: list[Rule]
    named: list[str] = field(default_factory=list)
    """Operators, groups and linears that must have run."""
    budget: float | None = None
    tiles: int = 1
    sending: list[bool] = field(default_factory=list)
    """Which layers send their input to the host."""
    sends_all_saved: bool = False
    """Whether they also send what else they save."""

    @property
    def recomputed(self) -> list[bool]:
        return [level not in ("everything", "budget") for level in self.levels]


@dataclass
class OperatorCount:
    """Runs of one operator in one layer, with second operands of one shape."""

    group: str
    shape: tuple[int, int] | None
    """(in, out) of a product's second operand."""
    saved: bool
    """Whether the rule says that its results are saved."""
    forward: int = 0
    recomputed: int = 0
    bytes: int = 0
    """Of its results in the forward pass."""


@dataclass
class Counts:
    """Counted runs. Each list has an entry for each layer."""

    operators: list[dict[tuple[str, Any], OperatorCount]]
    first: list[int]
    """Calls of the module that ran first in each layer: a norm or a linear."""
    tiles: list[list[int]]
    """Forward and backward calls of the first linear of each layer's MLP; if the MLP is one operator, its tiles."""

    def all(self) -> list[tuple[str, OperatorCount]]:
        return [(name, one) for layer in self.operators for (name, _), one in layer.items()]


def evidence(model: nn.Module, expected: Expected, probe: dict[str, Any]) -> Iterator[Evidence]:
    """Run `model` on `probe`, forward and backward, and compare. See Technique.verify."""
    layers = decoder_layers(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad][:1]

    def forward() -> torch.Tensor:
        logits: torch.Tensor = model(**probe).logits
        return logits

    def backward(logits: torch.Tensor) -> Any:
        return torch.autograd.grad(logits.float().mean(), trained)

    with observed(model):
        counts = count(layers, expected.rules, forward, backward)
        if any(expected.recomputed):
            yield _layers_ran_twice(expected, layers, trained, counts)
        yield _operators_ran(expected, layers, counts)
        if any(expected.sending):
            yield from _offloaded(model, expected, probe, lambda: backward(forward()))
        elif expected.budget is not None:
            yield _budget_in_force(model, expected.budget, layers, probe, forward)
        elif any(expected.recomputed):
            yield from _bytes_saved(model, expected, layers, probe, forward, counts)
    if expected.tiles > 1:
        yield _tiled(expected.tiles, probe["input_ids"].numel(), counts)


def _layers_ran_twice(
    expected: Expected, layers: list[nn.Module], trained: list[nn.Parameter], counts: Counts
) -> Evidence:
    # Layers below the first trained parameter have no backward pass, so they are not recomputed.
    has_trained = [any(parameter.requires_grad for parameter in layer.parameters()) for layer in layers]
    owned = {id(parameter) for layer in layers for parameter in layer.parameters()}
    first = 0 if any(id(parameter) not in owned for parameter in trained) else has_trained.index(True)
    calls = [1 + (recomputed and index >= first) for index, recomputed in enumerate(expected.recomputed)]
    return Evidence(
        "checkpointing",
        f"{sum(expected.recomputed)} of {len(layers)} layers recomputed",
        f"{sum(calls > 1 for calls in counts.first)} of {len(layers)} layers ran twice in one forward and backward",
        counts.first == calls,
    )


def _operators_ran(expected: Expected, layers: list[nn.Module], counts: Counts) -> Evidence:
    """Whether no saved operator ran again, and all operators that the recipe names ran."""
    sizes, ranks = policy.linears(layers[0]) | dict(fuse.group_sizes(layers[0])), policy.ranks(layers[0])
    shapes = {shape: ", ".join(name for name in sizes if sizes[name] == shape) for shape in sizes.values()}
    totals: dict[str, list[int]] = {}
    for name, one in counts.all():
        total = totals.setdefault(f"{name} ({shapes.get(one.shape, 'adapters')})" if one.shape else name, [0, 0])
        total[0] += one.forward
        total[1] += one.recomputed
    runs = ", ".join(f"{name} {forward}+{again}" for name, (forward, again) in totals.items())
    any_again = any(one.recomputed for _, one in counts.all())
    # Tiles also repeat the MLP's adapters, which have the shapes of attention's.
    tiled = {one.shape for _, one in counts.all() if expected.tiles > 1 and one.shape and one.shape[1] in ranks}
    wrong = [name for name, one in counts.all() if one.saved and one.recomputed and one.shape not in tiled]
    in_mlp = fuse.MLP if any(map(fuse.is_fused_mlp, layers[0].modules())) else ()

    def ran(name: str) -> bool:
        return any(
            name in (operator, policy.STANDS_FOR.get(operator), one.group)
            or one.shape == sizes.get(name, ())
            or (name in in_mlp and operator == "fxtune.lora_mlp")
            for operator, one in counts.all()
        )

    missing = [name for name in expected.named if not ran(name)]
    note = f"; never ran: {', '.join(missing)}" if missing else ""
    return Evidence(
        "checkpointing",
        expected.description,
        f"runs forward + again: {runs or 'none'}{note}",
        not wrong and not missing and (any_again or "input" not in expected.levels),
    )


def _bytes_saved(
    model: nn.Module,
    expected: Expected,
    layers: list[nn.Module],
    probe: dict[str, Any],
    forward: Callable[[], Any],
    counts: Counts,
) -> Iterator[Evidence]:
    """The bytes that autograd saves in the layers, compiled if they are, and the bytes that the rules allow."""
    everything, arguments, saved, one_graph = _measure_bytes(model, layers, probe, forward)
    each = probe["input_ids"].numel() * len(layers)
    inputs = arguments * (len(layers) + 4 * one_graph)  # one graph has the last norm's in it, too
    if set(expected.levels) - {"input"} and saved == everything:
        return  # layers are not compiled: torch's selective policy then stores tensors outside of these hooks
    by_rules = sum(one.bytes for _, one in counts.all() if one.saved)
    allowed = inputs + by_rules + everything * ("everything" in expected.levels)
    yield Evidence(
        "checkpointing",
        f"at most {allowed / each:,.0f} bytes a token and layer kept for the backward pass",
        f"{saved / each:,.0f} bytes",
        saved <= allowed,
    )


def _budget_in_force(
    model: nn.Module, budget: float, layers: list[nn.Module], probe: dict[str, Any], forward: Callable[[], Any]
) -> Evidence:
    """The compiler's budget while layers run. In a row as short as the probe weights dominate, so the bytes prove
    little."""
    everything, _, saved, one_graph = _measure_bytes(model, layers, probe, forward)
    each = probe["input_ids"].numel() * len(layers)
    found: list[float] = []
    hook = (backbone(model) if one_graph else layers[0]).register_forward_pre_hook(
        lambda *_: found.append(torch._functorch.config.activation_memory_budget)
    )
    forward()
    hook.remove()
    return Evidence(
        "checkpointing",
        f"a budget of {budget:g} for the compiler",
        f"{found[-1]:g} while layers run; {saved / each:,.0f} of {everything / each:,.0f} bytes a token and layer of "
        "the probe kept",
        found[-1] == budget,
    )


def _measure_bytes(
    model: nn.Module, layers: list[nn.Module], probe: dict[str, Any], forward: Callable[[], Any]
) -> tuple[int, int, int, bool]:
    """The bytes that are saved without compiled code, those of one layer's arguments, those that are saved as the
    model runs, and whether all layers are one graph."""
    tokens = probe["input_ids"].numel()
    with torch.compiler.set_stance("force_eager"):
        everything, arguments = saved_bytes(model, layers, tokens, forward)
    decoder = backbone(model)
    one_graph = "forward" in vars(decoder)  # techniques.compile.scope=model: no hook can stand between its layers
    saved, _ = saved_bytes(model, [decoder] if one_graph else layers, tokens, forward)
    return everything, arguments, saved, one_graph


def _offloaded(model: Any, expected: Expected, probe: dict[str, Any], step: Callable[[], Any]) -> Iterator[Evidence]:
    offload, senders = getattr(model, "offload", None), sum(expected.sending)
    sent = fetched = size = 0
    if offload is not None:
        before = offload.inputs_sent, offload.inputs_fetched, offload.sent
        min_bytes, offload.min_bytes = offload.min_bytes, 0  # the probe's tensors are small
        with torch.enable_grad():
            step()
        offload.min_bytes = min_bytes
        after = offload.inputs_sent, offload.inputs_fetched, offload.sent
        sent, fetched, size = (now - then for now, then in zip(after, before, strict=True))
    yield Evidence(
        "checkpointing",
        f"the inputs of {senders} layers wait in host memory",
        f"{sent} sent there and {fetched} brought back in one forward and backward",
        sent == fetched == senders,
    )
    if expected.sends_all_saved:
        each = senders * probe["input_ids"].numel()
        inputs = model.config.get_text_config().hidden_size * next(model.parameters()).element_size()
        yield Evidence(
            "checkpointing",
            f"what else they keep waits there, too: more than {inputs:,} bytes a token and layer",
            f"{size / each:,.0f} bytes",
            size / each > inputs,
        )


def _tiled(tiles: int, tokens: int, counts: Counts) -> Evidence:
    pieces = -(-tokens // -(-tokens // tiles))
    found = sorted({tuple(calls) for calls in counts.tiles})
    # Twice as many if something in the layer follows its MLP (Gemma 2's norm): recomputing that runs the MLP, too.
    fits = all(forward == pieces and again in (0, pieces, 2 * pieces) for forward, again in found)
    return Evidence(
        "checkpointing",
        f"each MLP in {pieces} tiles (of the probe's {tokens} tokens)",
        " or ".join(f"{forward} forward and {again} again" for forward, again in found),
        fits and any(again for _, again in found),
    )


def count(
    layers: list[nn.Module], rules: list[Rule], forward: Callable[[], Any], backward: Callable[[Any], Any]
) -> Counts:
    """Run `backward(forward())` without compiled code, and count attention and products of `layers`. `rules`: each
    layer's."""
    mode = _Count(rules)
    hooks = []
    for index, layer in enumerate(layers):
        bypassed = {
            id(part) for module in layer.modules() for part in fused_modules.bypassed(module)
        }  # a hook would unfuse them
        inner = [module for module in layer.modules() if module is not layer and id(module) not in bypassed]
        for module in inner:
            hooks.append(module.register_forward_pre_hook(partial(mode.enter, index)))
            hooks.append(module.register_forward_hook(mode.leave, always_call=True))
        leaves = [module for module in inner if not list(module.children())]
        hooks += [module.register_forward_pre_hook(partial(mode.first, index)) for module in leaves]
        mlp = getattr(layer, "mlp", None)
        if isinstance(mlp, nn.Module) and getattr(mlp, "fused", None) != "mlp":  # a fused MLP counts its tiles itself
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
        self.rules, self.backward = rules, False
        self.layers: list[int] = []
        """Indices of the layers whose parts are being called."""
        self.leaves: dict[int, nn.Module] = {}
        self.owners: dict[int, int] = {}
        """Layers by the address of their MLP's weights, because the backward pass of a fused MLP runs in no module."""
        self.counts = Counts([{} for _ in rules], [0] * len(rules), [[0, 0] for _ in rules])

    def enter(self, index: int, *_: Any) -> None:
        self.layers.append(index)

    def leave(self, *_: Any) -> None:
        self.layers.pop()

    def first(self, index: int, leaf: nn.Module, *_: Any) -> None:
        self.counts.first[index] += self.leaves.setdefault(index, leaf) is leaf

    def tile(self, index: int, *_: Any) -> None:
        self.counts.tiles[index][self.backward] += 1

    def fused(self, weights: list[torch.Tensor], rows: torch.Tensor, tiles: int) -> None:
        """A fused MLP ran, forward or backward, on these rows."""
        index = self.owners.setdefault(weights[0].data_ptr(), self.layers[-1] if self.layers else -1)
        self.counts.tiles[index][self.backward] += -(-len(rows) // -(-len(rows) // tiles))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = name_of(func)
        if name.startswith("fxtune.lora_mlp"):
            self.fused(args[7] if name.endswith("backward") else args[3], args[0], args[-2])
        group = group_of(name)
        if group is not None and self.layers:
            shape = weight_shape(name, args) if group == "matmuls" else None
            index = self.layers[-1]
            new = OperatorCount(group, shape, self.rules[index].saves(name, args))
            counted = self.counts.operators[index].setdefault((name, shape), new)
            if self.backward:
                counted.recomputed += 1
            else:
                counted.forward += 1
                results = result if isinstance(result, (tuple, list)) else [result]
                counted.bytes += _bytes_of(results)
        return result


def saved_bytes(model: nn.Module, layers: list[nn.Module], tokens: int, forward: Callable[[], Any]) -> tuple[int, int]:
    """Bytes that autograd saves in the layers' forward pass, compiled or not, in tensors with an axis of `tokens`; and
    the bytes of one layer's arguments. Parameters do not count, and a tensor that several layers save counts once.
    """
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    found: dict[int, int] = {}
    inside: list[nn.Module] = []
    arguments = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        address = tensor.untyped_storage().data_ptr()
        if inside and tokens in tensor.shape and address not in weights:
            found[address] = max(found.get(address, 0), _bytes_of([tensor]))
        # An operator that saves its own result would otherwise be part of a reference cycle that Python cannot
        # collect, and with it the graph, its checkpoints and the model.
        return tensor.detach()

    def enter(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal arguments
        inside.append(layer)
        arguments = _bytes_of(tree_leaves((args, kwargs)))

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


def _bytes_of(values: Any) -> int:
    return sum(one.numel() * one.element_size() for one in values if isinstance(one, torch.Tensor))
