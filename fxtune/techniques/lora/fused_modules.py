"""Module classes whose forward runs adapters fused: a single linear, an attention, an MLP.

A module keeps its parameters, names and peft's own functions; its class becomes a subclass with another forward. All
layers share that class, so they share a compiled graph too. fuse.py decides which modules get one.

An attention's own code runs with a `StandIn` as its `self`, whose projections return the operator's results. If
techniques.liger.rope has given the attention fxtune's RoPE, and RoPE comes directly after the projections, these
return q and k rotated (kernels/rotary.py, `qkv`) and the attention's code does not rotate them.

A fused operator does not call the linears that it replaces. So if one of them has a hook (peft's `adapter_names`
argument sets some), or if its adapter is off or merged, the module's own forward runs and calls them one by one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from fxtune.kernels.autocast import compute_dtype
from fxtune.kernels.fused_lora import lora_linear, lora_mlp, padding_of
from fxtune.kernels.rotary import qkv
from fxtune.kernels.save_input import save_input_first
from fxtune.techniques.lora.frozen_weights import ADAPTER, FrozenWeights, storage_kind
from fxtune.upstream import torch as upstream
from fxtune.upstream.transformers import with_rotation


def bypassed(module: nn.Module) -> Iterator[nn.Module]:
    """The modules inside a fused one that its operator replaces and never calls."""
    fused = getattr(module, "fused", None)
    linears = [module] if fused == "linear" else [getattr(module, name) for name in getattr(module, "fused_names", ())]
    for linear in linears:
        yield from (part for part in linear.modules() if part is not module)


def groups(model: nn.Module, kind: str) -> list[FrozenWeights]:
    """The frozen weights of all fused groups of this kind."""
    return [module for module in model.modules() if isinstance(module, FrozenWeights) and module.kind == kind]


def _adapters(linears: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """lora_A, lora_B and scaling of each linear."""
    return (
        [linear.lora_A[ADAPTER].weight for linear in linears],
        [linear.lora_B[ADAPTER].weight for linear in linears],
        [linear.scaling[ADAPTER] for linear in linears],
    )


def _needs_own_forward(linears: Sequence[Any], called: bool = False) -> bool:
    """Whether an adapter is off or merged, another adapter is active, or a part has a hook.

    `called`: the linears themselves are called, so that their own hooks run anyway.
    """
    parts = [] if called else [*linears]
    for linear in linears:
        if linear.disable_adapters or linear.merged_adapters or linear.active_adapters != [ADAPTER]:
            return True
        parts += [linear.base_layer, linear.lora_A[ADAPTER], linear.lora_B[ADAPTER]]
    return any(map(upstream.has_hooks, parts))


def _product(module: Any, linears: Sequence[Any], x: torch.Tensor, padded: bool = False) -> torch.Tensor:
    a, b, scaling = _adapters(linears)
    bias = [linear.base_layer.bias for linear in linears if linear.base_layer.bias is not None]
    return lora_linear(x, a, b, module.frozen.tensors(), scaling, module.frozen.kind, bias, padded)


def _subclass(kind: Any, fused: str, forward: Callable[..., Any], **options: Any) -> Any:
    attributes = {"forward": forward, "fused": fused, "__module__": kind.__module__, **options}
    return type(f"Fused{kind.__name__}", (kind,), attributes)


def fuse_linear(linear: Any) -> None:
    """Run an adapted linear of peft as one operator."""
    linear.frozen = FrozenWeights([linear])
    linear.__class__ = _linear_class(linear.__class__)


@functools.cache
def _linear_class(kind: Any) -> Any:
    own = kind.forward

    def forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or _needs_own_forward([self], called=True):
            return own(self, x, *args, **kwargs)
        return _product(self, [self], x)

    return _subclass(kind, "linear", forward)


class Given:
    """Replaces a projection whose result is known."""

    def __init__(self, linear: nn.Module, hidden_states: torch.Tensor, result: torch.Tensor) -> None:
        self._linear, self._hidden_states, self._result = linear, hidden_states, result

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        assert hidden_states is self._hidden_states, "an attention projects other states than it was given"
        return self._result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._linear, name)


class StandIn:
    """Replaces an attention as `self` in its own code: some projections are given, all else is the attention's."""

    def __init__(self, attention: Any, given: dict[str, Given]) -> None:
        self.stands_for, self._given = attention, given

    def __getattr__(self, name: str) -> Any:
        given = self._given
        return given[name] if name in given else getattr(self.stands_for, name)


def given(names: Iterable[str], linears: Iterable[Any], hidden: Any, results: Iterable[Any]) -> dict[str, Given]:
    return {name: Given(linear, hidden, result) for name, linear, result in zip(names, linears, results, strict=True)}


def keep_unrotated(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> tuple[Any, Any]:
    """Replaces apply_rotary_pos_emb where q and k are already rotated."""
    return q, k


def without_rope(kind: Any) -> Any:
    """The forward of an attention's class without its rotation of q and k."""
    return with_rotation(kind.forward, keep_unrotated, kind)


def rotated_parts(product: torch.Tensor, attention: Any, angles: Any, sizes: Sequence[int], padding: int = 0) -> Any:
    """q and k rotated, and v, each [rows, length, size], from `product`, which holds them side by side."""
    heads, kv_heads = sizes[0] // attention.head_dim, sizes[1] // attention.head_dim
    cos, sin = angles
    return [part.flatten(2) for part in qkv(product, cos, sin, heads, kv_heads, padding)]


def fuse_attention(attention: Any, names: Sequence[str], rotate: bool) -> None:
    """Run the projections `names` of an attention, which its forward calls with its hidden states, as one operator.

    `rotate`: `names` are q, k and v, and the operator rotates q and k.
    """
    linears = [getattr(attention, name) for name in names]
    attention.fused_names = tuple(names)
    bias = linears[0].get_base_layer().bias is not None
    attention.fused_padding = padding_of([linear.r[ADAPTER] for linear in linears], storage_kind(linears[0]), bias)
    attention.frozen = FrozenWeights(linears)
    attention.__class__ = _attention_class(attention.__class__, rotate)


@functools.cache
def _attention_class(kind: Any, rotate: bool) -> Any:
    own = kind.forward
    unrotated = without_rope(kind) if rotate else own

    def forward(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        linears = [getattr(self, name) for name in self.fused_names]
        if _needs_own_forward(linears):
            return own(self, hidden_states, *args, **kwargs)
        sizes = [linear.out_features for linear in linears]
        angles = kwargs.get("position_embeddings")
        rotating = rotate and angles is not None
        product = _product(self, linears, hidden_states, padded=rotating and self.fused_padding > 0)
        if rotating:
            results = rotated_parts(product, self, angles, sizes, self.fused_padding)
        else:
            # Rotation will copy q and k. v is saved as it is, so it is copied here: a view would keep all three alive.
            results = [
                result.contiguous() if name == "v_proj" else result
                for name, result in zip(self.fused_names, product.split(sizes, -1), strict=True)
            ]
        stand_in = StandIn(self, given(self.fused_names, linears, hidden_states, results))
        return (unrotated if rotating else own)(stand_in, hidden_states, *args, **kwargs)

    return _subclass(kind, "attention", forward)


def fuse_mlp(mlp: Any, names: Sequence[str], act: str) -> None:
    """Run down(act(gate(x)) * up(x)) as one operator. `names`: of gate, up and down.

    Attributes that checkpointing sets before the module is compiled: `keep` (gate and up, for the backward pass),
    `recomputed` (a checkpoint around the module runs it again) and `tiles`.
    """
    linears = [getattr(mlp, name) for name in names]
    mlp.fused_names, mlp.fused_act = tuple(names), act
    mlp.frozen_up, mlp.frozen_down = FrozenWeights(linears[:2]), FrozenWeights(linears[2:])
    mlp.__class__ = _mlp_class(mlp.__class__)


@functools.cache
def _mlp_class(kind: Any) -> Any:
    own = kind.forward

    def forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        linears = [getattr(self, name) for name in self.fused_names]
        if args or kwargs or _needs_own_forward(linears):
            return own(self, x, *args, **kwargs)
        a, b, scaling = _adapters(linears)
        up, down = self.frozen_up, self.frozen_down
        rest: list[Any] = [up.tensors(), down.tensors(), scaling, up.kind, down.kind, self.fused_act]
        # An eager checkpoint runs this whole operator again, so the operator keeps gate and up then. The compiler's
        # checkpoint skips it, and the backward pass computes gate and up.
        eager = self.recomputed and not torch.compiler.is_compiling() and torch.is_grad_enabled()
        if eager and self.tiles > 1:
            return _tiled(x, a, b, [*rest, False, self.tiles])
        return lora_mlp(x, a, b, *rest, self.keep or eager, self.tiles)  # type: ignore[call-arg]  # mypy counts no list

    return _subclass(kind, "mlp", forward, keep=True, recomputed=False, tiles=1)


def _tiled(x: torch.Tensor, a: list[torch.Tensor], b: list[torch.Tensor], rest: list[Any]) -> torch.Tensor:
    """lora_mlp() in tiles, which a checkpoint around it does not repeat. `rest`: the operator's arguments after b."""
    operators = torch.ops.fxtune

    def backward(flat: torch.Tensor, gradient: torch.Tensor, wanted: Sequence[bool]) -> list[Any]:
        needs = [wanted[0], any(wanted[1 : len(a) + 1]), any(wanted[len(a) + 1 :])]
        dx, da, db = operators.lora_mlp_backward(gradient, flat, *[flat.new_empty(0)] * 3, a, b, *rest, needs)
        return [dx if needs[0] else None, *(da or [None] * len(a)), *(db or [None] * len(b))]

    flat = x.flatten(0, -2).to(compute_dtype(x))
    y = save_input_first(lambda flat: operators.lora_mlp(flat, a, b, *rest, None)[0], backward, flat, [*a, *b])
    return y.view(x.shape)
