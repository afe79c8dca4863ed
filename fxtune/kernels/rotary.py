"""Rotary position embedding (RoPE, arXiv 2104.09864) of queries and keys as operators: one kernel forward, one backward.

Each pair of a head's dimensions, i and i + width/2, is turned by its token's angle, as transformers' `rotate_half` has it:

    y1 = x1 cos1 - x2 sin1          dx1 = dy1 cos1 + dy2 sin2
    y2 = x2 cos2 + x1 sin2          dx2 = dy2 cos2 - dy1 sin1

cos and sin [rows, length, width] are transformers', computed once for all layers, so scaling (YaRN's attention factor included)
and packed positions are in them. Dimensions from `width` on, where it is less than a head's, are copied. All arithmetic is
float32 and each result is rounded once; written out in torch, bfloat16 is rounded three times.

`fxtune::rotary` takes q and k wherever they lie (any strides) and writes each in one piece, as [rows, length, heads, dim]: the
layout that attention kernels read without a copy. The backward pass is the same operator, `back`.

`fxtune::rotary_qkv` takes the product of all three projections, [rows, length, (heads + 2 kv_heads) dim], and returns q, k and v.
What it is for is the backward pass: dq, dk and dv are read where attention left them and written side by side, once, as the
gradient of that product, where autograd would write each and then put them together. The rows of that gradient may lie apart:
`room` numbers behind each are nobody's, and the matmul that reads them next may put its own there (see fused_lora.py, `room`).

Of 16,384 tokens of an 8B Llama forward must move 0.4 GB a layer and backward 0.4 GB, which is what the kernels do.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fxtune.errors import ConfigError

APPLY = "apply_rotary_pos_emb"
"""The function that attentions of transformers call for RoPE."""


def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """transformers' apply_rotary_pos_emb, arguments and results as there: q and k as [rows, heads, length, dim], or as
    [rows, length, heads, dim] with unsqueeze_dim=2. The results are of q's and k's dtype, whatever cos has.
    """
    assert unsqueeze_dim in (1, 2), unsqueeze_dim
    if unsqueeze_dim == 1:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    q, k = torch.ops.fxtune.rotary(q, k, cos, sin, False)
    return (q.transpose(1, 2), k.transpose(1, 2)) if unsqueeze_dim == 1 else (q, k)


def as_they_are(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """In place of apply_rotary_pos_emb where q and k are turned already."""
    return q, k


@functools.cache
def seeing(forward: Any, function: Callable[..., Any], owner: str) -> Any:
    """The code of `forward`, an attention's method, which finds `function` where it looks for apply_rotary_pos_emb.

    Raises ConfigError where it does not look for it; `owner` is what the message calls the attention.
    """
    if APPLY not in forward.__code__.co_names:
        raise ConfigError(f"techniques.liger.rope: {owner} of this transformers does not call {APPLY}. Set it to off.")
    # Its globals are those of a module of their own: torch.compile looks a function's globals up by their module's name.
    module = types.ModuleType(f"{forward.__module__}__{getattr(function, '__name__', 'other')}_{id(function):x}")
    module.__dict__.update({**forward.__globals__, APPLY: function, "__name__": module.__name__})
    module = sys.modules.setdefault(module.__name__, module)
    copy = types.FunctionType(
        forward.__code__, module.__dict__, forward.__name__, forward.__defaults__, forward.__closure__
    )
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy


@torch.library.custom_op(
    "fxtune::rotary",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor cos, Tensor sin, bool back) -> (Tensor, Tensor)",
)
def _rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, back: bool) -> tuple[Tensor, Tensor]:
    """q [rows, length, heads, dim] and k [rows, length, kv_heads, dim], turned; cos, sin [rows or 1, length, width].

    `back`: the transposed operation, which turns by the negative angle and scales by the same factor.
    """
    turned = q.new_empty(q.shape), k.new_empty(k.shape)
    _turn((q, k), turned, cos, sin, back)
    return turned


@_rotary.register_fake
def _(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, back: bool) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


def _rotary_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, _, cos, sin, ctx.back = inputs
    ctx.save_for_backward(cos, sin)


def _rotary_gradients(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Any, ...]:
    assert not any(ctx.needs_input_grad[2:4]), "angles are not trained"
    return *torch.ops.fxtune.rotary(dq, dk, *ctx.saved_tensors, not ctx.back), None, None, None


_rotary.register_autograd(_rotary_gradients, setup_context=_rotary_setup)


@torch.library.custom_op(
    "fxtune::rotary_qkv",
    mutates_args=(),
    schema="(Tensor x, Tensor cos, Tensor sin, SymInt heads, SymInt kv_heads, SymInt room) -> (Tensor, Tensor, Tensor)",
)
def _rotary_qkv(
    x: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, room: int
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k (turned) and v, [rows, length, each's heads, dim], of `x` [rows, length, (heads + 2 kv_heads) dim].

    `room`: so many numbers behind each row of x's gradient are left to whoever reads it.
    """
    parts = _parts(x, heads, kv_heads)
    q, k, v = (x.new_empty(part.shape) for part in parts)
    _turn(parts, (q, k, v), cos, sin, False)
    return q, k, v


@_rotary_qkv.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, room: int) -> tuple[Tensor, Tensor, Tensor]:
    dim = x.shape[-1] // (heads + 2 * kv_heads)
    q, k, v = (x.new_empty(*x.shape[:2], number, dim) for number in (heads, kv_heads, kv_heads))
    return q, k, v


@torch.library.custom_op(
    "fxtune::rotary_qkv_backward",
    mutates_args=(),
    schema="(Tensor dq, Tensor dk, Tensor dv, Tensor cos, Tensor sin, SymInt room) -> Tensor",
)
def _rotary_qkv_backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, room: int) -> Tensor:
    """[rows, length, N + room], whose first N columns are the gradient of rotary_qkv's x. The others are not written."""
    whole = dq.new_empty(_gathered(dq, dk, room))
    if room and not whole.is_cuda:  # oneDNN's bfloat16 matmul reads what lies between two rows
        whole[..., -room:] = 0
    parts = _parts(whole[..., : whole.shape[-1] - room], dq.shape[2], dk.shape[2])
    _turn((dq, dk, dv), parts, cos, sin, True)
    return whole


@_rotary_qkv_backward.register_fake
def _(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, room: int) -> Tensor:
    return dq.new_empty(_gathered(dq, dk, room))


def _qkv_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, cos, sin, _, _, ctx.room = inputs
    ctx.save_for_backward(cos, sin)


def _qkv_gradients(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Any, ...]:
    assert not any(ctx.needs_input_grad[1:3]), "angles are not trained"
    whole = torch.ops.fxtune.rotary_qkv_backward(dq, dk, dv, *ctx.saved_tensors, ctx.room)
    return whole[..., : whole.shape[-1] - ctx.room] if ctx.room else whole, None, None, None, None, None


_rotary_qkv.register_autograd(_qkv_gradients, setup_context=_qkv_setup)


def _gathered(dq: Tensor, dk: Tensor, room: int) -> list[int]:
    rows, length, heads, dim = dq.shape
    return [rows, length, (heads + 2 * dk.shape[2]) * dim + room]


def _parts(x: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views of q, k and v in their product."""
    each = x.unflatten(-1, (heads + 2 * kv_heads, -1))
    q, k, v = each.split([heads, kv_heads, kv_heads], 2)
    return q, k, v


def _turn(sources: Sequence[Tensor], targets: Sequence[Tensor], cos: Tensor, sin: Tensor, back: bool) -> None:
    """Write q and k, turned, and v, if there is one, as it is; each [rows, length, heads, dim]."""
    q = sources[0]
    rows, length, width = cos.shape
    shapes = q.shape, cos.shape, sin.shape
    assert rows in (1, q.shape[0]), shapes
    assert (length, width % 2, sin.shape) == (q.shape[1], 0, cos.shape), shapes
    assert width <= q.shape[3], shapes
    if q.is_cuda and q.dtype is not torch.float64:
        from fxtune.kernels.rotary_triton import turn

        turn(sources, targets, cos, sin, back)
        return
    for index, (source, target) in enumerate(zip(sources, targets, strict=True)):
        target.copy_(reference(source, cos, sin, back) if index < 2 else source)


def reference(x: Tensor, cos: Tensor, sin: Tensor, back: bool = False) -> Tensor:
    """The operation on x [rows, length, heads, dim] in plain torch: float32 (float64 for float64), and so its result."""
    wide = torch.float64 if x.dtype is torch.float64 else torch.float32
    width = cos.shape[-1]
    (x1, x2), (cos1, cos2), (sin1, sin2) = (
        each.chunk(2, -1) for each in (x[..., :width].to(wide), *(angle.to(wide).unsqueeze(2) for angle in (cos, sin)))
    )
    if back:
        sin1, sin2 = -sin2, -sin1
    return torch.cat([x1 * cos1 - x2 * sin1, x2 * cos2 + x1 * sin2, x[..., width:].to(wide)], -1)


def qkv(
    x: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, room: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """q and k, turned, and v, each [rows, length, its heads, dim], of their product [rows, length, (heads + 2 kv_heads) dim].

    `room`: the rows of x's gradient have so many numbers behind them that whoever reads it may overwrite.
    """
    made: tuple[Tensor, Tensor, Tensor] = torch.ops.fxtune.rotary_qkv(x, cos, sin, heads, kv_heads, room)
    return made
