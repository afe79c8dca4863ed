"""Rotary position embedding (RoPE, arXiv 2104.09864) of queries and keys as operators: one kernel forward, one
backward.

Each pair of a head's dimensions, i and i + width/2, is rotated by its token's angle, as transformers' `rotate_half`
does:

    y1 = x1 cos1 - x2 sin1          dx1 = dy1 cos1 + dy2 sin2
    y2 = x2 cos2 + x1 sin2          dx2 = dy2 cos2 - dy1 sin1

transformers computes cos and sin [rows, length, width], so they include RoPE scaling (with YaRN's attention factor)
and the positions of packed documents. If `width` is less than the dimension of a head, the dimensions behind `width`
are copied. All arithmetic is float32, and each result is rounded once. Plain torch would round bfloat16 three times.

`fxtune::rotary` takes q and k with any strides and returns each contiguous, as [rows, length, heads, dim]: the layout
that attention kernels read without a copy. The backward pass is the same operator with `back=True`.

`fxtune::rotary_qkv` takes the product of all three projections, [rows, length, (heads + 2 kv_heads) dim], and returns
q, k and v. Its backward pass reads dq, dk and dv where attention left them and writes them side by side, once.
Autograd would write each gradient and then concatenate the three. Each row of the backward pass's result is followed
by `room` numbers of padding, in which fused_lora.py writes dy B.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """transformers' apply_rotary_pos_emb: q and k are [rows, heads, length, dim], or [rows, length, heads, dim] with
    unsqueeze_dim=2. The results have the dtypes of q and k."""
    assert unsqueeze_dim in (1, 2), unsqueeze_dim
    if unsqueeze_dim == 1:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    q, k = torch.ops.fxtune.rotary(q, k, cos, sin, False)
    return (q.transpose(1, 2), k.transpose(1, 2)) if unsqueeze_dim == 1 else (q, k)


@torch.library.custom_op("fxtune::rotary", mutates_args=())
def _rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, back: bool) -> tuple[Tensor, Tensor]:
    """q [rows, length, heads, dim] and k [rows, length, kv_heads, dim], rotated; cos, sin [rows or 1, length, width].

    `back`: apply the transpose, for the gradient: rotate by the negative angle, with the same scale.
    """
    rotated = q.new_empty(q.shape), k.new_empty(k.shape)
    _rotate((q, k), rotated, cos, sin, back)
    return rotated


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


@torch.library.custom_op("fxtune::rotary_qkv", mutates_args=())
def _rotary_qkv(
    x: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, room: int
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k (rotated) and v, each [rows, length, its heads, dim], of `x` [rows, length, (heads + 2 kv_heads) dim].

    `room`: numbers of padding behind each row of x's gradient. The reader of the gradient may overwrite the padding.
    """
    results = _qkv_results(x, heads, kv_heads)
    _rotate(_parts(x, heads, kv_heads), results, cos, sin, False)
    return results


@_rotary_qkv.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, room: int) -> tuple[Tensor, Tensor, Tensor]:
    return _qkv_results(x, heads, kv_heads)


def _qkv_results(x: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    dim = x.shape[-1] // (heads + 2 * kv_heads)
    q, k, v = (x.new_empty(*x.shape[:2], number, dim) for number in (heads, kv_heads, kv_heads))
    return q, k, v


@torch.library.custom_op("fxtune::rotary_qkv_backward", mutates_args=())
def _rotary_qkv_backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, room: int) -> Tensor:
    """[rows, length, N + room]: the N columns of the gradient of rotary_qkv's x, and behind them padding."""
    padded = dq.new_empty(_gradient_shape(dq, dk, room))
    if room and not padded.is_cuda:  # oneDNN's bfloat16 matmul multiplies the padding by zeros
        padded[..., -room:] = 0
    parts = _parts(padded[..., : padded.shape[-1] - room], dq.shape[2], dk.shape[2])
    _rotate((dq, dk, dv), parts, cos, sin, True)
    return padded


@_rotary_qkv_backward.register_fake
def _(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, room: int) -> Tensor:
    return dq.new_empty(_gradient_shape(dq, dk, room))


def _qkv_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, cos, sin, _, _, ctx.room = inputs
    ctx.save_for_backward(cos, sin)


def _qkv_gradients(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Any, ...]:
    assert not any(ctx.needs_input_grad[1:3]), "angles are not trained"
    padded = torch.ops.fxtune.rotary_qkv_backward(dq, dk, dv, *ctx.saved_tensors, ctx.room)
    return padded[..., : padded.shape[-1] - ctx.room] if ctx.room else padded, None, None, None, None, None


_rotary_qkv.register_autograd(_qkv_gradients, setup_context=_qkv_setup)


def _gradient_shape(dq: Tensor, dk: Tensor, room: int) -> list[int]:
    rows, length, heads, dim = dq.shape
    return [rows, length, (heads + 2 * dk.shape[2]) * dim + room]


def _parts(x: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as views of `x`, the product of the three projections."""
    q, k, v = x.unflatten(-1, (heads + 2 * kv_heads, -1)).split([heads, kv_heads, kv_heads], 2)
    return q, k, v


def _rotate(sources: Sequence[Tensor], targets: Sequence[Tensor], cos: Tensor, sin: Tensor, back: bool) -> None:
    """Write q and k rotated, and v (if given) unchanged, to `targets`. Each tensor is [rows, length, heads, dim]."""
    q = sources[0]
    rows, length, width = cos.shape
    shapes = q.shape, cos.shape, sin.shape
    assert rows in (1, q.shape[0]), shapes
    assert (length, width % 2, sin.shape) == (q.shape[1], 0, cos.shape), shapes
    assert width <= q.shape[3], shapes
    if q.is_cuda and q.dtype is not torch.float64:
        from fxtune.kernels.rotary_triton import rotate

        rotate(sources, targets, cos, sin, back)
        return
    for index, (source, target) in enumerate(zip(sources, targets, strict=True)):
        target.copy_(reference(source, cos, sin, back) if index < 2 else source)


def reference(x: Tensor, cos: Tensor, sin: Tensor, back: bool = False) -> Tensor:
    """The rotation of x [rows, length, heads, dim] in plain torch and float32 (float64 for float64)."""
    wide = torch.promote_types(x.dtype, torch.float32)
    width = cos.shape[-1]
    rotated, cos, sin = x[..., :width].to(wide), cos.to(wide).unsqueeze(2), sin.to(wide).unsqueeze(2)
    (x1, x2), (cos1, cos2), (sin1, sin2) = (tensor.chunk(2, -1) for tensor in (rotated, cos, sin))
    if back:
        sin1, sin2 = -sin2, -sin1
    return torch.cat([x1 * cos1 - x2 * sin1, x2 * cos2 + x1 * sin2, x[..., width:].to(wide)], -1)


def qkv(
    x: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, room: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """The operator rotary_qkv, by default without `room`; see _rotary_qkv."""
    return torch.ops.fxtune.rotary_qkv(x, cos, sin, heads, kv_heads, room)
