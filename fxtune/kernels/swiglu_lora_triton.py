"""Triton kernels of swiglu.py: act(gate + xa b_gate^T) * (up + xa b_up^T), and its gradient.

A separate matmul that adds an adapter's product to gate and up would read and write the widest tensor of a layer once
more: for each token of Llama-3-8B it would read 57 KB and write 57 KB. The gated activation reads that tensor anyway,
so its kernel adds the product, a few dozen multiplications a number, on tensor cores. A program keeps its columns of b
and loops over rows, or computes one tile if there are few rows. The backward kernel works tile by tile and also adds
the product of down_proj's adapter to the gradient of p. With many rows and small ranks swiglu_reduce_triton.py
replaces the backward kernel. Its kernel also sums the gradients of adapters.

All arithmetic is float32. Offsets are int64: 128k rows of 28,672 numbers exceed int32. Import this module only on a
GPU.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from fxtune.kernels.triton_parts import activation, load, matrix, rank_block, store

TILE = (64, 64, 4)
"""Rows, columns and warps of each program."""
WALK = dict(ROWS=16, COLUMNS=128, STAGES=4, num_warps=4)
"""The launch of _walk: rows of an iteration, columns of a program, and how many iterations' loads overlap."""
WALK_ROWS = 512
"""Rows for each program of _walk. If there are fewer rows than this, there is a program for each tile."""
RANKS = 64
"""The most columns of xa in one product."""

Share = tuple[Tensor, Tensor]


def forward(act: str, gate_up: Tensor, out: Tensor, share: Share) -> None:
    """Write act(gate + xa b_gate^T) * (up + xa b_up^T) to `out` [rows, width].

    `gate_up`: [rows, 2 width]; `share`: xa [rows, R] and b [2 width, R]. All have contiguous rows.
    """
    (rows, width), ranks = out.shape, share[0].shape[1]
    _check_shapes(gate_up, out, share)
    tensors = *map(matrix, (gate_up, *share, out)), rows, width, ranks
    options = dict(SILU=act == "silu", RANKS=_block(ranks))
    if rows >= WALK_ROWS and ranks <= RANKS:
        program_rows = triton.cdiv(WALK_ROWS, WALK["ROWS"]) * WALK["ROWS"]
        _walk[(triton.cdiv(width, WALK["COLUMNS"]), triton.cdiv(rows, program_rows))](
            *tensors, program_rows, **options, **WALK
        )
    elif rows:
        _launch_tiles(_forward, rows, width, tensors, options)


def backward(act: str, gate_up: Tensor, dp: Tensor, out: Tensor, share: Share, above: Share) -> None:
    """Write [dgate | dup] to `out` [rows, 2 width], and p to `dp` [rows, width] in place of the gradient of p.

    `above`: ya [rows, Q] and a [Q, width]; ya a is added to dp before the gradients are computed.
    """
    (rows, width), (ya, a) = dp.shape, above
    _check_shapes(gate_up, dp, share)
    assert (out.shape, ya.shape, a.shape) == (gate_up.shape, (rows, len(a)), (len(a), width))
    if rows:
        ranks = share[0].shape[1]
        tensors = *map(matrix, (gate_up, *share, dp, ya, a, out)), rows, width, ranks, len(a)
        options = dict(SILU=act == "silu", RANKS=_block(ranks), ABOVE=_block(len(a)))
        _launch_tiles(_backward, rows, width, tensors, options)


def _launch_tiles(kernel: Any, rows: int, width: int, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    down, across, warps = TILE
    grid = triton.cdiv(width, across), triton.cdiv(rows, down)
    kernel[grid](*arguments, **options, ROWS=down, COLUMNS=across, num_warps=warps)


def _check_shapes(gate_up: Tensor, out: Tensor, share: Share) -> None:
    (rows, width), (xa, b) = out.shape, share
    assert (gate_up.shape, xa.shape, len(b)) == ((rows, 2 * width), (rows, b.shape[1]), 2 * width)


def _block(ranks: int) -> int:
    return min(rank_block(ranks), RANKS)


@triton.jit
def _add_product(total, left, right, row, column, rows, width, ranks, RANKS: tl.constexpr):
    """`total` plus a tile of `left` [rows, ranks] times `right` [ranks, width]. `row` and `column` are the tile's
    place, int64 [ROWS, 1] and [1, COLUMNS].

    `right` has two strides: between ranks and between columns.
    """
    for start in range(0, ranks, RANKS):
        rank = start + tl.arange(0, RANKS)
        left_tile = load(left, row, rank[None, :], (row < rows) & (rank[None, :] < ranks))
        right_tile = tl.load(
            right[0] + rank[:, None] * right[1] + column * right[2],
            mask=(rank[:, None] < ranks) & (column < width),
            other=0.0,
        )
        total = tl.dot(left_tile, right_tile, total, input_precision="ieee")
    return total


@triton.jit
def _gate_and_up(gate_up, xa, b, row, column, rows, width, ranks, RANKS: tl.constexpr):
    at = gate_up[0] + row * gate_up[1] + column
    inside = (row < rows) & (column < width)
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + width, mask=inside, other=0.0).to(tl.float32)
    gate = _add_product(gate, xa, (b[0], 1, b[1]), row, column, rows, width, ranks, RANKS)
    b_up = b[0] + tl.cast(width, tl.int64) * b[1]
    up = _add_product(up, xa, (b_up, 1, b[1]), row, column, rows, width, ranks, RANKS)
    return gate, up


@triton.jit
def _forward(
    gate_up, xa, b, out, rows, width, ranks,
    SILU: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    gate, up = _gate_and_up(gate_up, xa, b, row, column, rows, width, ranks, RANKS)
    activated, _ = activation(gate, SILU)
    store(out, row, column, activated * up, (row < rows) & (column < width))


@triton.jit
def _walk(
    gate_up, xa, b, out, rows, width, ranks, program_rows,
    SILU: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The forward pass for `program_rows` rows and a block of columns. The block's part of b stays in registers."""
    column = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    step, rank = tl.arange(0, ROWS)[:, None], tl.arange(0, RANKS)
    b_at, in_b = b[0] + column.to(tl.int64) * b[1] + rank[:, None], (rank[:, None] < ranks) & (column < width)
    b_gate = tl.load(b_at, mask=in_b, other=0.0)
    b_up = tl.load(b_at + tl.cast(width, tl.int64) * b[1], mask=in_b, other=0.0)
    first = tl.program_id(1) * program_rows
    last = tl.minimum(first + program_rows, rows)
    for start in tl.range(first, last, ROWS, num_stages=STAGES):
        # Only the offset of a tile's first row is int64. Offsets within the tile are int32: half the registers.
        below, at = step < last - start, tl.cast(start, tl.int64)
        inside = below & (column < width)
        gate_at = gate_up[0] + at * gate_up[1]
        gate = tl.load(gate_at + (step * gate_up[1] + column), mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_at + width + (step * gate_up[1] + column), mask=inside, other=0.0).to(tl.float32)
        xa_at = xa[0] + at * xa[1] + (step * xa[1] + rank[None, :])
        narrow = tl.load(xa_at, mask=below & (rank[None, :] < ranks), other=0.0)
        activated, _ = activation(tl.dot(narrow, b_gate, gate, input_precision="ieee"), SILU)
        p = activated * tl.dot(narrow, b_up, up, input_precision="ieee")
        tl.store(out[0] + at * out[1] + (step * out[1] + column), p.to(out[0].dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    gate_up, xa, b, dp, ya, a, out, rows, width, ranks, above,
    SILU: tl.constexpr, RANKS: tl.constexpr, ABOVE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = (row < rows) & (column < width)
    dp_at = dp[0] + (row * dp[1] + column)
    d_p = tl.load(dp_at, mask=inside, other=0.0).to(tl.float32)
    d_p = _add_product(d_p, ya, (a[0], a[1], 1), row, column, rows, width, above, ABOVE)
    gate, up = _gate_and_up(gate_up, xa, b, row, column, rows, width, ranks, RANKS)
    activated, slope = activation(gate, SILU)
    out_at = out[0] + (row * out[1] + column)
    tl.store(out_at, (d_p * up * slope).to(out[0].dtype.element_ty), mask=inside)
    tl.store(out_at + width, (d_p * activated).to(out[0].dtype.element_ty), mask=inside)
    tl.debug_barrier()  # every thread reads its part of dp before any thread overwrites dp
    tl.store(dp_at, (activated * up).to(dp[0].dtype.element_ty), mask=inside)
