"""The Triton kernel of rotary.py. A program handles one token: it rotates all heads of q and k, and copies v's.

So a token's cos and sin are read once, and q, k and v are read once and written once: 24 KB for a token of an 8B
Llama. Offsets are int64. Import this module only on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

PAIRS = 2048
"""Pairs of dimensions that a program rotates at a time. With four warps each thread reads 16 pairs, 64 bytes."""
WARPS = 4


def rotate(sources: Sequence[Tensor], targets: Sequence[Tensor], cos: Tensor, sin: Tensor, back: bool) -> None:
    """Write q and k rotated, and v (if given) unchanged, to `targets`. All are [rows, length, heads, dim] with any
    strides; cos and sin are [rows or 1, length, width]. `back`: apply the transpose."""
    rows, length, heads, dim = sources[0].shape
    if not rows * length:
        return
    assert all(x.stride(3) == 1 for x in targets), [x.stride() for x in targets]
    last = len(sources) - 1  # without v, k is passed in its place and not read
    tensors = [(x, *x.stride()[:3]) for x in (*map(_rows, sources), *targets)]
    q, k, v, to_q, to_k, to_v = (tensors[at] for at in (0, 1, last, last + 1, last + 2, 2 * last + 1))
    angles = [(x, x.stride(0) if x.shape[0] > 1 else 0, x.stride(1)) for x in map(_rows, (cos, sin))]
    width, kv_heads = cos.shape[2], sources[1].shape[2]
    half = triton.next_power_of_2(max(width // 2, 1))
    block, kv_block = (min(triton.next_power_of_2(number), max(PAIRS // half, 1)) for number in (heads, kv_heads))
    _rotary[(rows * length,)](
        q, k, v, to_q, to_k, to_v, *angles, length,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, WIDTH=width, HALF=half, DIMS=triton.next_power_of_2(dim),
        REST=triton.next_power_of_2(max(dim - width, 1)), BLOCK=block, KV_BLOCK=kv_block, BACK=back,
        HAS_V=last == 2, num_warps=WARPS,
    )  # fmt: skip


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


@triton.jit
def _rotary(
    q, k, v, to_q, to_k, to_v, cos, sin, length,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr,
    DIMS: tl.constexpr, REST: tl.constexpr, BLOCK: tl.constexpr, KV_BLOCK: tl.constexpr, BACK: tl.constexpr,
    HAS_V: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row, token = (program // length).to(tl.int64), (program % length).to(tl.int64)
    pair = tl.arange(0, HALF)[None, :]
    in_width = pair < WIDTH // 2
    cos_at = cos[0] + (row * cos[1] + token * cos[2])
    sin_at = sin[0] + (row * sin[1] + token * sin[2])
    cos1 = tl.load(cos_at + pair, mask=in_width, other=0.0).to(tl.float32)
    cos2 = tl.load(cos_at + WIDTH // 2 + pair, mask=in_width, other=0.0).to(tl.float32)
    sin1 = tl.load(sin_at + pair, mask=in_width, other=0.0).to(tl.float32)
    sin2 = tl.load(sin_at + WIDTH // 2 + pair, mask=in_width, other=0.0).to(tl.float32)
    if BACK:
        sin1, sin2 = -sin2, -sin1
    angles = cos1, cos2, sin1, sin2
    q_heads, to_q_heads = _of_token(q, row, token), _of_token(to_q, row, token)
    _heads(q_heads, to_q_heads, angles, pair, HEADS, DIM, WIDTH, REST, BLOCK)
    k_heads, to_k_heads = _of_token(k, row, token), _of_token(to_k, row, token)
    _heads(k_heads, to_k_heads, angles, pair, KV_HEADS, DIM, WIDTH, REST, KV_BLOCK)
    if HAS_V:
        _copy(_of_token(v, row, token), _of_token(to_v, row, token), 0, KV_HEADS, DIM, DIMS, KV_BLOCK)


@triton.jit
def _of_token(x, row, token):
    """The heads of a token: a pointer and the stride between heads."""
    return x[0] + row * x[1] + token * x[2], x[3]


@triton.jit
def _heads(
    source, target, angles, pair,
    HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotate all heads of a token, BLOCK at a time."""
    cos1, cos2, sin1, sin2 = angles
    kind = target[0].dtype.element_ty
    for first in tl.static_range(0, HEADS, BLOCK):
        head = first + tl.arange(0, BLOCK)[:, None]
        inside = (head < HEADS) & (pair < WIDTH // 2)
        source_at, target_at = source[0] + head * source[1] + pair, target[0] + head * target[1] + pair
        x1 = tl.load(source_at, mask=inside, other=0.0).to(tl.float32)
        x2 = tl.load(source_at + WIDTH // 2, mask=inside, other=0.0).to(tl.float32)
        tl.store(target_at, (x1 * cos1 - x2 * sin1).to(kind), mask=inside)
        tl.store(target_at + WIDTH // 2, (x2 * cos2 + x1 * sin2).to(kind), mask=inside)
    if WIDTH < DIM:
        _copy(source, target, WIDTH, HEADS, DIM, REST, BLOCK)


@triton.jit
def _copy(
    source, target,
    FROM: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy the dimensions from FROM on, for all heads of a token."""
    column = FROM + tl.arange(0, COLUMNS)[None, :]
    for first in tl.static_range(0, HEADS, BLOCK):
        head = first + tl.arange(0, BLOCK)[:, None]
        inside = (head < HEADS) & (column < DIM)
        x = tl.load(source[0] + head * source[1] + column, mask=inside, other=0.0)
        tl.store(target[0] + head * target[1] + column, x, mask=inside)
