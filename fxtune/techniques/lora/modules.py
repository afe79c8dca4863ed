"""The forwards of modules with fused adapters (fused_lora.py), and the classes that carry them.

A module gets a class of its own, a subclass of what it was, with one of these as its forward. All layers share the class and the
function, so they share a compiled graph too. Which modules get one is decided in fxtune/techniques/lora/fuse.py.

An attention's own code runs as it is, over a stand-in for the module (`_Seen`) whose projections hand out what the operator has
computed. State that one projection leaves for the next would do as well, but torch.compile traces none inside a checkpoint.

Where techniques.liger.rope has given the attention our own RoPE, and its code does nothing between the projections and that, what
is handed out is turned already (rotary.py, `qkv`), and its code turns nothing.

An operator calls none of the linears that it stands for. So where somebody listens to one of them (a hook; peft's own for the
argument `adapter_names` is one), or its adapter is off or merged, the module's own forward runs, and calls them one by one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fxtune.kernels.frozen_base import DENSE, DENSE_CUTE
from fxtune.kernels.fused_lora import lora_linear, lora_mlp, room_of
from fxtune.kernels.rotary import as_they_are, qkv, seeing
from fxtune.techniques.checkpointing.tiled_mlp import kept_early
from fxtune.techniques.lora.frozen_weights import ADAPTER, FrozenWeights, storage_kind

MLP = ("gate_proj", "up_proj", "down_proj")


def uncalled(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The modules inside of a fused one that its operator does the work of, without calling them."""
    for _, linears in _inside(module):
        for linear in linears:
            yield from (part for part in linear.modules() if part is not module)


def _inside(module: Any) -> list[tuple[FrozenWeights, list[Any]]]:
    """Each group that a module runs as one operator: its frozen weights and its linears; nothing where it is not fused."""
    fused = getattr(module, "fused", None)
    if fused == "mlp":
        return [(module.frozen_up, [module.gate_proj, module.up_proj]), (module.frozen_down, [module.down_proj])]
    if fused == "attention":
        return [(module.frozen, [getattr(module, name) for name in module.fused_names])]
    return [(module.frozen, [module])] if fused == "linear" else []


def use_cute(model: torch.nn.Module) -> None:
    """Let quack's kernel multiply by the 16-bit weights of all groups of a fused model (kernels/matmul.py)."""
    for module in model.modules():
        if isinstance(module, FrozenWeights) and module.kind == DENSE:
            module.kind = DENSE_CUTE


def cute_weights(model: torch.nn.Module) -> list[torch.Tensor]:
    """The matrices by which quack's kernel multiplies."""
    return [
        module.weight for module in model.modules() if isinstance(module, FrozenWeights) and module.kind == DENSE_CUTE
    ]


def _halves(linears: Sequence[Any]) -> tuple[list[torch.Tensor], list[torch.Tensor], list[float]]:
    """lora_A, lora_B and scaling of each linear."""
    return (
        [linear.lora_A[ADAPTER].weight for linear in linears],
        [linear.lora_B[ADAPTER].weight for linear in linears],
        [linear.scaling[ADAPTER] for linear in linears],
    )


def _as_peft(linears: Sequence[Any], called: bool = False) -> bool:
    """Whether adapters are switched off or merged into the weights, or others than ADAPTER act, or a part of them is listened to.

    `called`: the linears themselves are called, so that their own hooks run.
    """
    if any(
        linear.disable_adapters or linear.merged_adapters or linear.active_adapters != [ADAPTER] for linear in linears
    ):
        return True
    parts = [
        part for linear in linears for part in (linear.base_layer, linear.lora_A[ADAPTER], linear.lora_B[ADAPTER])
    ]
    return any(
        part._forward_pre_hooks or part._forward_hooks or part._backward_pre_hooks or part._backward_hooks
        for part in (parts if called else [*linears, *parts])
    )


def _product(module: Any, linears: Sequence[Any], x: torch.Tensor, room: bool = False) -> torch.Tensor:
    a, b, scaling = _halves(linears)
    bias = [linear.base_layer.bias for linear in linears if linear.base_layer.bias is not None]
    return lora_linear(x, a, b, module.frozen.tensors(), scaling, module.frozen.kind, bias, room)


def fuse_linear(linear: Any) -> None:
    """Let an adapted linear of peft run as one operator."""
    linear.frozen = FrozenWeights([linear])
    kind: Any = type(linear)
    linear.__class__ = _linear_kind(kind)


@functools.cache
def _linear_kind(kind: Any) -> Any:
    own = kind.forward

    def forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args or kwargs or _as_peft([self], called=True):
            whole: torch.Tensor = own(self, x, *args, **kwargs)
            return whole
        return _product(self, [self], x)

    return _subclass(kind, "linear", forward)


def fuse_attention(attention: Any, names: Sequence[str], turned: bool = False) -> None:
    """Let the projections `names` of an attention, which its forward calls with its hidden_states, run as one operator.

    `turned`: they are q, k and v, and its forward gives q and k to apply_rotary_pos_emb as they are.
    """
    attention.fused_names = tuple(names)
    linears = [getattr(attention, name) for name in names]
    bias = linears[0].get_base_layer().bias is not None
    attention.fused_room = room_of([linear.r[ADAPTER] for linear in linears], storage_kind(linears[0]), bias)
    attention.frozen = FrozenWeights(linears)
    kind: Any = type(attention)
    attention.__class__ = _attention_kind(kind, turned)


class _Given:
    """A projection whose result is there."""

    def __init__(self, hidden_states: torch.Tensor, result: torch.Tensor) -> None:
        self.hidden_states, self.result = hidden_states, result

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        assert hidden_states is self.hidden_states, "an attention projects other states than those that it was given"
        return self.result


class _Seen:
    """Stands for an attention in its own code: some of its projections are given, everything else is the attention's."""

    def __init__(self, attention: Any, given: dict[str, _Given]) -> None:
        self._attention, self._given = attention, given

    def __getattr__(self, name: str) -> Any:
        given = self._given
        return given[name] if name in given else getattr(self._attention, name)


@functools.cache
def _attention_kind(kind: Any, turned: bool) -> Any:
    own = kind.forward
    without_rope = seeing(own, as_they_are, kind.__name__) if turned else None

    def forward(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        linears = [getattr(self, name) for name in self.fused_names]
        if _as_peft(linears):
            return own(self, hidden_states, *args, **kwargs)
        angles = kwargs.get("position_embeddings")
        at_once = without_rope is not None and angles is not None
        product = _product(self, linears, hidden_states, room=at_once and self.fused_room > 0)
        if without_rope is not None and angles is not None:
            heads, kv_heads = (linear.out_features // self.head_dim for linear in linears[:2])
            cos, sin = angles
            parts = qkv(product, cos, sin, heads, kv_heads, self.fused_room)
            given = {
                name: _Given(hidden_states, part.flatten(2))
                for name, part in zip(self.fused_names, parts, strict=True)
            }
            return without_rope(_Seen(self, given), hidden_states, *args, **kwargs)
        results = product.split([linear.out_features for linear in linears], -1)
        # q and k are rotated into tensors of their own. v is kept as it is, and a view of it would keep all three.
        given = {
            name: _Given(hidden_states, result.contiguous() if name == "v_proj" else result)
            for name, result in zip(self.fused_names, results, strict=True)
        }
        return own(_Seen(self, given), hidden_states, *args, **kwargs)

    return _subclass(kind, "attention", forward)


def fuse_mlp(mlp: Any, act: str) -> None:
    """Let down(act(gate(x)) * up(x)) run as one operator. The module may be told, before it is compiled:

    `keep`: keep gate and up for the backward pass; `recomputed`: a checkpoint around it computes it again; `tiles`.
    """
    mlp.fused_act = act
    linears = [getattr(mlp, name) for name in MLP]
    mlp.frozen_up, mlp.frozen_down = FrozenWeights(linears[:2]), FrozenWeights(linears[2:])
    kind: Any = type(mlp)
    mlp.__class__ = _mlp_kind(kind)


@functools.cache
def _mlp_kind(kind: Any) -> Any:
    own = kind.forward

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        linears = [self.gate_proj, self.up_proj, self.down_proj]
        if _as_peft(linears):
            plain: torch.Tensor = own(self, x)
            return plain
        up, up_kind = self.frozen_up.tensors(), self.frozen_up.kind
        down, down_kind = self.frozen_down.tensors(), self.frozen_down.kind
        a, b, scaling = _halves(linears)
        # A checkpoint that runs operator by operator computes this operator again as a whole, so that is where gate and up come
        # from; the compiler's leaves it out, and the backward pass makes them.
        eager = self.recomputed and not torch.compiler.is_compiling() and torch.is_grad_enabled()
        if eager and self.tiles > 1:
            return _tiled(x, a, b, [up, down, scaling, up_kind, down_kind, self.fused_act, False, self.tiles])
        return lora_mlp(x, a, b, up, down, scaling, up_kind, down_kind, self.fused_act, self.keep or eager, self.tiles)

    return _subclass(kind, "mlp", forward, keep=True, recomputed=False, tiles=1)


def _tiled(x: torch.Tensor, a: list[torch.Tensor], b: list[torch.Tensor], rest: list[Any]) -> torch.Tensor:
    """lora_mlp() in tiles, which a checkpoint around it does not run again. `rest`: the arguments of both operators after b."""
    device, operators = x.device.type, torch.ops.fxtune

    def backward(flat: torch.Tensor, gradient: torch.Tensor, wanted: Sequence[bool]) -> list[Any]:
        asked = [wanted[0], any(wanted[1 : len(a) + 1]), any(wanted[len(a) + 1 :])]
        dx, da, db = operators.lora_mlp_backward(gradient, flat, *[flat.new_empty(0)] * 3, a, b, *rest, asked)
        return [
            dx if asked[0] else None,
            *(da if asked[1] else [None] * len(a)),
            *(db if asked[2] else [None] * len(b)),
        ]

    flat = x.flatten(0, -2).to(torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype)
    return kept_early(lambda flat: operators.lora_mlp(flat, a, b, *rest, None)[0], backward, flat, [*a, *b]).view(
        x.shape
    )


def _subclass(kind: Any, fused: str, forward: Callable[..., Any], **options: Any) -> Any:
    attributes = {"forward": forward, "fused": fused, "__module__": kind.__module__, **options}
    return type(f"Fused{kind.__name__}", (kind,), attributes)
