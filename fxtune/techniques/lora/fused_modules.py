"""Modules that run adapters fused: a single linear, an attention, an MLP.

An attention or an MLP is replaced by a module with the same parts (models/replacement.py). A single linear stays
peft's, for names, saving and merging. It gets a subclass of its class (upstream/peft.py). fuse.py decides which
modules run fused. All layers share a class, so they share a compiled graph, too.

An attention's own code runs with a `StandIn` as its `self`. The StandIn's projections return the operator's results.
If techniques.liger has given the attention fxtune's RoPE, and RoPE comes directly after the projections, the StandIn's
projections return q and k already rotated (kernels/rotary.py, `qkv`), and the attention's code does not rotate q and
k.

A fused operator does not call the linears that it replaces. So the module's own forward calls each linear if a linear
has a hook (peft's `adapter_names` argument sets some), or if its adapter is off or merged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from fxtune.kernels.autocast import compute_dtype
from fxtune.kernels.fused_lora import lora_linear, lora_mlp, padding_of
from fxtune.kernels.rotary import qkv
from fxtune.kernels.save_input import save_input_first
from fxtune.models.peft_adapter import ADAPTER
from fxtune.models.replacement import InPlaceOf
from fxtune.techniques.lora.frozen_weights import FrozenWeights, storage_kind
from fxtune.upstream import torch as upstream
from fxtune.upstream.peft import specialize
from fxtune.upstream.transformers import with_rotation


def bypassed(module: nn.Module) -> Iterator[nn.Module]:
    """The modules inside a fused module that its operator replaces and never calls."""
    linears: list[nn.Module] = [module] if isinstance(module, FusedLinear) else []
    if isinstance(module, FusedAttention | FusedMlp):
        linears = module.fused_linears()
    for linear in linears:
        yield from (part for part in linear.modules() if part is not module)


def groups(model: nn.Module, kind: str) -> list[FrozenWeights]:
    """The frozen weights of all fused groups of this kind."""
    return [module for module in model.modules() if isinstance(module, FrozenWeights) and module.kind == kind]


def forward_of(module: nn.Module) -> Any:
    """The function that `module` runs, with `self` as its first argument. It is the method of the class, unless the
    module has a forward of its own (attention/linear.py gives one to recurrent layers). None if that forward is no
    method, so that it cannot run with a StandIn."""
    own = vars(module).get("forward")
    return type(module).forward if own is None else getattr(own, "__func__", None)


def _adapters(linears: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    return (
        [linear.lora_A[ADAPTER].weight for linear in linears],
        [linear.lora_B[ADAPTER].weight for linear in linears],
        [linear.scaling[ADAPTER] for linear in linears],
    )


def _needs_own_forward(linears: Sequence[Any], called: bool = False) -> bool:
    """Whether an adapter is off or merged, another adapter is active, or a part has a hook.

    `called`: the linears themselves are being called, so their own hooks run anyway.
    """
    parts = [] if called else [*linears]
    for linear in linears:
        if linear.disable_adapters or linear.merged_adapters or linear.active_adapters != [ADAPTER]:
            return True
        parts += [linear.base_layer, linear.lora_A[ADAPTER], linear.lora_B[ADAPTER]]
    return any(map(upstream.has_hooks, parts))


def _product(frozen: FrozenWeights, linears: Sequence[Any], x: torch.Tensor, padded: bool = False) -> torch.Tensor:
    a, b, scaling = _adapters(linears)
    bias = [linear.base_layer.bias for linear in linears if linear.base_layer.bias is not None]
    return lora_linear(x, a, b, frozen.tensors(), scaling, frozen.kind, bias, padded)


class FusedLinear:
    """The class that fuse_linear() gives an adapted linear, beside peft's class. The linear runs as one operator."""

    frozen: FrozenWeights

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or _needs_own_forward([self], called=True):
            return super().forward(x, *args, **kwargs)  # type: ignore[misc]  # peft's
        return _product(self.frozen, [self], x)


def fuse_linear(linear: Any) -> None:
    """Let an adapted linear of peft run as one operator."""
    linear.frozen = FrozenWeights([linear])
    specialize(linear, FusedLinear)


class Given:
    """Replaces a projection whose result is known."""

    def __init__(self, linear: nn.Module, hidden_states: torch.Tensor, result: torch.Tensor) -> None:
        self._linear, self._hidden_states, self._result = linear, hidden_states, result

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        # A recurrent layer that gets a mask sets the padding of its input to zero, and projects the result.
        return self._result if hidden_states is self._hidden_states else self._linear(hidden_states)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._linear, name)


class StandIn:
    """Replaces an attention as `self` in its own code. Some projections are `Given`, the rest is the attention's."""

    def __init__(self, attention: Any, given: dict[str, Given]) -> None:
        self.stands_for, self._given = attention, given

    def __getattr__(self, name: str) -> Any:
        given = self._given
        return given[name] if name in given else getattr(self.stands_for, name)


def given(names: Iterable[str], linears: Iterable[Any], hidden: Any, results: Iterable[Any]) -> dict[str, Given]:
    return {name: Given(linear, hidden, result) for name, linear, result in zip(names, linears, results, strict=True)}


def keep_unrotated(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> tuple[Any, Any]:
    """Replaces apply_rotary_pos_emb. Returns q and k unchanged, because they are already rotated."""
    return q, k


def without_rope(kind: Any) -> Any:
    """The forward of the attention class `kind`, without the rotation of q and k."""
    return with_rotation(kind.forward, keep_unrotated)


def rotated_parts(product: torch.Tensor, attention: Any, angles: Any, sizes: Sequence[int], padding: int = 0) -> Any:
    """Split `product`, which has q, k and v side by side. Returns rotated q and k, and v, each [rows, length,
    size]."""
    heads, kv_heads = sizes[0] // attention.head_dim, sizes[1] // attention.head_dim
    cos, sin = angles
    return [part.flatten(2) for part in qkv(product, cos, sin, heads, kv_heads, padding)]


class FusedAttention(InPlaceOf):
    """An attention whose projections `names` run as one operator. Its code calls them with its hidden states."""

    def __init__(self, attention: Any, names: Sequence[str], rotates: bool) -> None:
        """`rotates`: `names` are q, k and v, and the operator rotates q and k."""
        super().__init__(attention)
        kind, self.fused_names, self.rotates = type(attention), tuple(names), rotates
        # These are functions and no methods, so they take a StandIn as `self`.
        own = forward_of(attention)
        self.own_forward, self.unrotated_forward = own, without_rope(kind) if rotates else own
        linears = self.fused_linears()
        bias = linears[0].get_base_layer().bias is not None
        self.fused_padding = padding_of([linear.r[ADAPTER] for linear in linears], storage_kind(linears[0]), bias)
        self.frozen = FrozenWeights(linears)

    def fused_linears(self) -> list[Any]:
        return [getattr(self, name) for name in self.fused_names]

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        linears = self.fused_linears()
        if _needs_own_forward(linears):
            return self.own_forward(self.replaced, hidden_states, *args, **kwargs)
        sizes = [linear.out_features for linear in linears]
        angles = kwargs.get("position_embeddings")
        rotating = self.rotates and angles is not None
        product = _product(self.frozen, linears, hidden_states, padded=rotating and self.fused_padding > 0)
        if rotating:
            results = rotated_parts(product, self.replaced, angles, sizes, self.fused_padding)
        else:
            # Rotation copies q and k. v is copied here: autograd saves it, and a view would keep all three alive.
            results = [
                result.contiguous() if name == "v_proj" else result
                for name, result in zip(self.fused_names, product.split(sizes, -1), strict=True)
            ]
        stand_in = StandIn(self.replaced, given(self.fused_names, linears, hidden_states, results))
        return (self.unrotated_forward if rotating else self.own_forward)(stand_in, hidden_states, *args, **kwargs)


class FusedMlp(InPlaceOf):
    """Computes down(act(gate(x)) * up(x)) as one operator. `names`: the names of gate, up and down."""

    def __init__(self, mlp: Any, names: Sequence[str], act: str) -> None:
        super().__init__(mlp)
        self.fused_names, self.fused_act = tuple(names), act
        linears = self.fused_linears()
        self.frozen_up, self.frozen_down = FrozenWeights(linears[:2]), FrozenWeights(linears[2:])
        # Checkpointing sets the next three attributes before the module is compiled.
        self.keep = True
        """Whether the results of gate and up are kept for the backward pass."""
        self.recomputed = False
        """Whether a checkpoint around the module runs it again."""
        self.tiles = 1

    def fused_linears(self) -> list[Any]:
        return [getattr(self, name) for name in self.fused_names]

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        linears = self.fused_linears()
        if args or kwargs or _needs_own_forward(linears):
            return self.replaced.forward(x, *args, **kwargs)
        a, b, scaling = _adapters(linears)
        up, down = self.frozen_up, self.frozen_down
        rest: list[Any] = [up.tensors(), down.tensors(), scaling, up.kind, down.kind, self.fused_act]
        # An eager checkpoint runs this whole operator again, so in eager mode the operator keeps gate and up. A
        # compiled checkpoint skips the operator, and the backward pass computes gate and up again.
        eager = self.recomputed and not torch.compiler.is_compiling() and torch.is_grad_enabled()
        if eager and self.tiles > 1:
            return _tiled(x, a, b, [*rest, False, self.tiles])
        return lora_mlp(x, a, b, *rest, self.keep or eager, self.tiles)  # type: ignore[call-arg]  # mypy counts no list


def _tiled(x: torch.Tensor, a: list[torch.Tensor], b: list[torch.Tensor], rest: list[Any]) -> torch.Tensor:
    """Run lora_mlp() in tiles. A checkpoint around the call does not repeat the tiles. `rest`: the operator's
    arguments after b."""
    operators = torch.ops.fxtune

    def backward(flat: torch.Tensor, gradient: torch.Tensor, wanted: Sequence[bool]) -> list[Any]:
        needs = [wanted[0], any(wanted[1 : len(a) + 1]), any(wanted[len(a) + 1 :])]
        dx, da, db = operators.lora_mlp_backward(gradient, flat, *[flat.new_empty(0)] * 3, a, b, *rest, needs)
        return [dx if needs[0] else None, *(da or [None] * len(a)), *(db or [None] * len(b))]

    flat = x.flatten(0, -2).to(compute_dtype(x))
    y = save_input_first(lambda flat: operators.lora_mlp(flat, a, b, *rest, None)[0], backward, flat, [*a, *b])
    return y.view(x.shape)
