"""Triton kernels of swiglu.py: act(gate + xa b_gate^T) * (up + xa b_up^T), and its gradient.

A separate matmul that adds an adapter's product to gate and up would read and write the widest tensor of a layer once
more: 57 KB a token of Llama-3-8B, twice. The gated activation reads that tensor anyway, so its kernel adds the
product, a few dozen multiplications a number, on tensor cores. A program keeps its columns of b and loops over rows,
or computes one tile if there are few rows. The backward kernel works tile by tile and also adds the product of
down_proj's adapter to the gradient of p. With many rows and small ranks swiglu_reduce_triton.py takes its place, which
also sums the gradients of adapters.

All arithmetic is float32. Offsets are int64: 128k rows of 28,672 numbers exceed int32. Import this module only where
there is a GPU: torch's CPU builds come without triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fxtune.kernels.activation import activation

TILE = (64, 64, 4)
"""Rows, columns and warps of each program."""
WALK = dict(ROWS=16, COLUMNS=128, STAGES=4, num_warps=4)
"""The launch of _walk, where a program loops over rows: rows a step, columns a program, steps whose loads overlap."""
WALK_ROWS = 512
"""Rows for each program of _walk. If there are fewer rows than this, each tile has a program of its own."""
RANKS = 64
"""Columns of xa in one product."""

Share = tuple[torch.Tensor, torch.Tensor]


def forward(act: str, gate_up: torch.Tensor, out: torch.Tensor, share: Share) -> None:
    """Write act(gate + xa b_gate^T) * (up + xa b_up^T) to `out` [rows, width].

    `gate_up`: [rows, 2 width]; `share`: xa [rows, R] and b [2 width, R]. All have contiguous rows.
    """
    (rows, width), (xa, b) = out.shape, share
    _check_shapes(gate_up, out, xa, b)
    if rows >= WALK_ROWS and xa.shape[1] <= RANKS:
        each = triton.cdiv(WALK_ROWS, WALK["ROWS"]) * WALK["ROWS"]
        _walk[(triton.cdiv(width, WALK["COLUMNS"]), triton.cdiv(rows, each))](
            gate_up,
            gate_up.stride(0),
            xa,
            xa.stride(0),
            b,
            b.stride(0),
            out,
            out.stride(0),
            rows,
            width,
            xa.shape[1],
            each,
            SILU=act == "silu",
            RANKS=_block(xa),
            **WALK,
        )
    elif rows:
        _forward[(triton.cdiv(width, TILE[1]), triton.cdiv(rows, TILE[0]))](
            gate_up,
            gate_up.stride(0),
            xa,
            xa.stride(0),
            b,
            b.stride(0),
            out,
            out.stride(0),
            rows,
            width,
            xa.shape[1],
            SILU=act == "silu",
            RANKS=_block(xa),
            ROWS=TILE[0],
            COLUMNS=TILE[1],
            num_warps=TILE[2],
        )


def backward(act: str, gate_up: torch.Tensor, dp: torch.Tensor, out: torch.Tensor, share: Share, above: Share) -> None:
    """Write [dgate | dup] to `out` [rows, 2 width] and p over its gradient `dp` [rows, width].

    `above`: ya [rows, Q] and a [Q, width]; ya a is added to dp first.
    """
    (rows, width), (xa, b), (ya, a) = dp.shape, share, above
    _check_shapes(gate_up, dp, xa, b)
    assert (out.shape, ya.shape, a.shape) == (gate_up.shape, (rows, len(a)), (len(a), width))
    assert out.stride(1) == ya.stride(1) == a.stride(1) == 1
    if rows:
        _backward[(triton.cdiv(width, TILE[1]), triton.cdiv(rows, TILE[0]))](
            gate_up,
            gate_up.stride(0),
            xa,
            xa.stride(0),
            b,
            b.stride(0),
            dp,
            dp.stride(0),
            ya,
            ya.stride(0),
            a,
            a.stride(0),
            out,
            out.stride(0),
            rows,
            width,
            xa.shape[1],
            len(a),
            SILU=act == "silu",
            RANKS=_block(xa),
            ABOVE=_block(ya),
            ROWS=TILE[0],
            COLUMNS=TILE[1],
            num_warps=TILE[2],
        )


def _check_shapes(gate_up: torch.Tensor, out: torch.Tensor, xa: torch.Tensor, b: torch.Tensor) -> None:
    rows, width = out.shape
    assert (gate_up.shape, xa.shape, len(b)) == ((rows, 2 * width), (rows, b.shape[1]), 2 * width)
    assert gate_up.stride(1) == xa.stride(1) == b.stride(1) == out.stride(1) == 1


def _block(xa: torch.Tensor) -> int:
    return int(min(max(triton.next_power_of_2(xa.shape[1]), 16), RANKS))


@triton.jit
def _added(
    total,
    left_ptr,
    left_stride,
    right_ptr,
    rank_stride,
    column_stride,
    row,
    column,
    rows,
    width,
    ranks,
    RANKS: tl.constexpr,
):
    """total + left right, [rows, ranks] by [ranks, width]; `row` and `column` as int64 [ROWS, 1] and [1, COLUMNS]."""
    for start in range(0, ranks, RANKS):
        rank = start + tl.arange(0, RANKS)
        left = tl.load(
            left_ptr + row * left_stride + rank[None, :], mask=(row < rows) & (rank[None, :] < ranks), other=0.0
        )
        right = tl.load(
            right_ptr + rank[:, None] * rank_stride + column * column_stride,
            mask=(rank[:, None] < ranks) & (column < width),
            other=0.0,
        )
        total = tl.dot(left, right, total, input_precision="ieee")
    return total


@triton.jit
def _gate_and_up(
    gate_up_ptr,
    gate_up_stride,
    xa_ptr,
    xa_stride,
    b_ptr,
    b_stride,
    row,
    column,
    rows,
    width,
    ranks,
    RANKS: tl.constexpr,
):
    at = gate_up_ptr + row * gate_up_stride + column
    inside = (row < rows) & (column < width)
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + width, mask=inside, other=0.0).to(tl.float32)
    gate = _added(gate, xa_ptr, xa_stride, b_ptr, 1, b_stride, row, column, rows, width, ranks, RANKS)
    b_ptr += tl.cast(width, tl.int64) * b_stride
    up = _added(up, xa_ptr, xa_stride, b_ptr, 1, b_stride, row, column, rows, width, ranks, RANKS)
    return gate, up


@triton.jit
def _forward(
    gate_up_ptr,
    gate_up_stride,
    xa_ptr,
    xa_stride,
    b_ptr,
    b_stride,
    out_ptr,
    out_stride,
    rows,
    width,
    ranks,
    SILU: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = (tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    gate, up = _gate_and_up(
        gate_up_ptr, gate_up_stride, xa_ptr, xa_stride, b_ptr, b_stride, row, column, rows, width, ranks, RANKS
    )
    activated, _ = activation(gate, SILU)
    tl.store(
        out_ptr + row * out_stride + column,
        (activated * up).to(out_ptr.dtype.element_ty),
        mask=(row < rows) & (column < width),
    )


@triton.jit
def _walk(
    gate_up_ptr,
    gate_up_stride,
    xa_ptr,
    xa_stride,
    b_ptr,
    b_stride,
    out_ptr,
    out_stride,
    rows,
    width,
    ranks,
    each,
    SILU: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The forward pass for `each` rows and a block of columns, whose part of b stays in registers."""
    column = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    step, rank = tl.arange(0, ROWS)[:, None], tl.arange(0, RANKS)
    b_at, held = b_ptr + column.to(tl.int64) * b_stride + rank[:, None], (rank[:, None] < ranks) & (column < width)
    b_gate = tl.load(b_at, mask=held, other=0.0)
    b_up = tl.load(b_at + tl.cast(width, tl.int64) * b_stride, mask=held, other=0.0)
    first = tl.program_id(1) * each
    last = tl.minimum(first + each, rows)
    for start in tl.range(first, last, ROWS, num_stages=STAGES):
        # Offsets within a tile are int32, and only that of its first row is int64: half the registers.
        below, at = step < last - start, tl.cast(start, tl.int64)
        inside = below & (column < width)
        gate_at = gate_up_ptr + at * gate_up_stride
        gate = tl.load(gate_at + (step * gate_up_stride + column), mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_at + width + (step * gate_up_stride + column), mask=inside, other=0.0).to(tl.float32)
        xa_at = xa_ptr + at * xa_stride + (step * xa_stride + rank[None, :])
        xa = tl.load(xa_at, mask=below & (rank[None, :] < ranks), other=0.0)
        activated, _ = activation(tl.dot(xa, b_gate, gate, input_precision="ieee"), SILU)
        p = activated * tl.dot(xa, b_up, up, input_precision="ieee")
        tl.store(out_ptr + at * out_stride + (step * out_stride + column), p.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    gate_up_ptr,
    gate_up_stride,
    xa_ptr,
    xa_stride,
    b_ptr,
    b_stride,
    dp_ptr,
    dp_stride,
    ya_ptr,
    ya_stride,
    a_ptr,
    a_stride,
    out_ptr,
    out_stride,
    rows,
    width,
    ranks,
    above,
    SILU: tl.constexpr,
    RANKS: tl.constexpr,
    ABOVE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = (tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = (row < rows) & (column < width)
    dp_ptr += row * dp_stride + column
    dp = tl.load(dp_ptr, mask=inside, other=0.0).to(tl.float32)
    dp = _added(dp, ya_ptr, ya_stride, a_ptr, a_stride, 1, row, column, rows, width, above, ABOVE)
    gate, up = _gate_and_up(
        gate_up_ptr, gate_up_stride, xa_ptr, xa_stride, b_ptr, b_stride, row, column, rows, width, ranks, RANKS
    )
    activated, slope = activation(gate, SILU)
    out_ptr += row * out_stride + column
    tl.store(out_ptr, (dp * up * slope).to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(out_ptr + width, (dp * activated).to(out_ptr.dtype.element_ty), mask=inside)
    tl.debug_barrier()  # every thread reads its dp before one overwrites it
    tl.store(dp_ptr, (activated * up).to(dp_ptr.dtype.element_ty), mask=inside)
