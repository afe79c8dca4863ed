"""The Triton kernel of rotary.py. A program handles one token: it rotates all heads of q and k, and copies v's.

So a token's cos and sin are read once, and everything else is read once and written once: 24 KB a token of an 8B
Llama. Offsets are int64. Imported only on a GPU: torch's CPU builds do not include triton.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

PAIRS = 2048
"""Pairs of dimensions that a program rotates at a time. With four warps a thread has 16 pairs, 64 bytes to read."""
WARPS = 4


def rotate(sources: Sequence[Tensor], targets: Sequence[Tensor], cos: Tensor, sin: Tensor, back: bool) -> None:
    """Write q and k rotated, and v (if given) unchanged, to `targets`. All are [rows, length, heads, dim] with any
    strides; cos and sin are [rows or 1, length, width]. `back`: apply the transpose."""
    rows, length, heads, dim = sources[0].shape
    if not rows * length:
        return
    inputs = [x if x.stride(3) == 1 else x.contiguous() for x in sources]
    assert all(x.stride(3) == 1 for x in targets), [x.stride() for x in targets]
    angles = [x if x.stride(2) == 1 else x.contiguous() for x in (cos, sin)]
    has_v = len(inputs) == 3
    arguments = [
        argument
        for x in ([*inputs, *targets] if has_v else [*inputs, inputs[1], *targets, targets[1]])
        for argument in (x, *x.stride()[:3])
    ]
    arguments += [argument for x in angles for argument in (x, x.stride(0) if x.shape[0] > 1 else 0, x.stride(1))]
    width, kv_heads = cos.shape[2], inputs[1].shape[2]
    half = triton.next_power_of_2(max(width // 2, 1))
    block, kv_block = (min(triton.next_power_of_2(number), max(PAIRS // half, 1)) for number in (heads, kv_heads))
    _rotary[(rows * length,)](
        *arguments,
        length,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        WIDTH=width,
        HALF=half,
        DIMS=triton.next_power_of_2(dim),
        REST=triton.next_power_of_2(max(dim - width, 1)),
        BLOCK=block,
        KV_BLOCK=kv_block,
        BACK=back,
        HAS_V=has_v,
        num_warps=WARPS,
    )


@triton.jit
def _rotary(
    q,
    q_row,
    q_token,
    q_head,
    k,
    k_row,
    k_token,
    k_head,
    v,
    v_row,
    v_token,
    v_head,
    to_q,
    to_q_row,
    to_q_token,
    to_q_head,
    to_k,
    to_k_row,
    to_k_token,
    to_k_head,
    to_v,
    to_v_row,
    to_v_token,
    to_v_head,
    cos,
    cos_row,
    cos_token,
    sin,
    sin_row,
    sin_token,
    length,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    DIMS: tl.constexpr,
    REST: tl.constexpr,
    BLOCK: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    BACK: tl.constexpr,
    HAS_V: tl.constexpr,
):
    program = tl.program_id(0)
    row, token = (program // length).to(tl.int64), (program % length).to(tl.int64)
    pair = tl.arange(0, HALF)[None, :]
    known = pair < WIDTH // 2
    cos += row * cos_row + token * cos_token
    sin += row * sin_row + token * sin_token
    cos1 = tl.load(cos + pair, mask=known, other=0.0).to(tl.float32)
    cos2 = tl.load(cos + WIDTH // 2 + pair, mask=known, other=0.0).to(tl.float32)
    sin1 = tl.load(sin + pair, mask=known, other=0.0).to(tl.float32)
    sin2 = tl.load(sin + WIDTH // 2 + pair, mask=known, other=0.0).to(tl.float32)
    if BACK:
        sin1, sin2 = -sin2, -sin1
    _heads(
        q + row * q_row + token * q_token,
        q_head,
        to_q + row * to_q_row + token * to_q_token,
        to_q_head,
        cos1,
        cos2,
        sin1,
        sin2,
        pair,
        HEADS,
        DIM,
        WIDTH,
        REST,
        BLOCK,
    )
    _heads(
        k + row * k_row + token * k_token,
        k_head,
        to_k + row * to_k_row + token * to_k_token,
        to_k_head,
        cos1,
        cos2,
        sin1,
        sin2,
        pair,
        KV_HEADS,
        DIM,
        WIDTH,
        REST,
        KV_BLOCK,
    )
    if HAS_V:
        _copy(
            v + row * v_row + token * v_token,
            v_head,
            to_v + row * to_v_row + token * to_v_token,
            to_v_head,
            0,
            KV_HEADS,
            DIM,
            DIMS,
            KV_BLOCK,
        )


@triton.jit
def _heads(
    source,
    source_head,
    target,
    target_head,
    cos1,
    cos2,
    sin1,
    sin2,
    pair,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    REST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rotate all heads of a token, BLOCK at a time."""
    for first in tl.static_range(0, HEADS, BLOCK):
        head = first + tl.arange(0, BLOCK)[:, None]
        inside = (head < HEADS) & (pair < WIDTH // 2)
        one, two = source + head * source_head + pair, target + head * target_head + pair
        x1 = tl.load(one, mask=inside, other=0.0).to(tl.float32)
        x2 = tl.load(one + WIDTH // 2, mask=inside, other=0.0).to(tl.float32)
        kind = target.dtype.element_ty
        tl.store(two, (x1 * cos1 - x2 * sin1).to(kind), mask=inside)
        tl.store(two + WIDTH // 2, (x2 * cos2 + x1 * sin2).to(kind), mask=inside)
    if WIDTH < DIM:
        _copy(source, source_head, target, target_head, WIDTH, HEADS, DIM, REST, BLOCK)


@triton.jit
def _copy(
    source,
    source_head,
    target,
    target_head,
    FROM: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy the dimensions from FROM on of all heads of a token."""
    column = FROM + tl.arange(0, COLUMNS)[None, :]
    for first in tl.static_range(0, HEADS, BLOCK):
        head = first + tl.arange(0, BLOCK)[:, None]
        inside = (head < HEADS) & (column < DIM)
        x = tl.load(source + head * source_head + column, mask=inside, other=0.0)
        tl.store(target + head * target_head + column, x, mask=inside)
