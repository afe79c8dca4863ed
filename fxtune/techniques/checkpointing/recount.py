"""What layers compute, compute again and keep, seen from outside: the evidence for what a checkpointing policy claims.

Operators are counted below autograd by a dispatch mode, in layers that run operator by operator. An operator of the backward
pass that runs inside the call of some part of a layer (its norm, its attention, one of its linears) is a repetition: gradients
are computed outside of any. What is kept is counted where autograd stores it, which works for compiled layers, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fxtune.techniques.checkpointing.policy import Rule, group_of, name_of, weight_shape
from fxtune.techniques.lora import modules


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
            id(part) for module in layer.modules() for part in modules.uncalled(module)
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
