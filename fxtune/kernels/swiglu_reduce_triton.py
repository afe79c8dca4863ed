"""The gated activation's backward kernel that also computes gradients of adapters from its results.

[dgate | dup] and p, which swiglu_lora_triton.py writes, are the widest tensors of a layer, and three gradients are
sums over their rows: dgate^T xa and dup^T xa for the lora_B of gate and up, and p^T dyb for the lora_A of down. A
separate pass over memory for these gradients would cost as much as the activation's gradient itself. Here a program
keeps a block of columns and loops over the rows. It multiplies the numbers that it has just computed, in registers and
on tensor cores, and sums in float32. So p is written only if the caller needs it for p A^T.

The rows are cut into parts to fill the GPU. Each part has its own sums, and lora_triton.unpack() adds the parts
up in a fixed order: the same bits each time. dgate, dup and p are rounded to 16 bits before they are multiplied, as
they would be in memory. gate_up and dp come without the products of their adapters. The kernel adds the products, and
keeps the second factor of each in registers.

All other arithmetic is float32. Offsets are int64. Import this module only on a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fxtune.kernels.triton_parts import activation, matrix, rank_block

NARROW = 16
"""The largest rank whose sums fit into registers for all COLUMNS of a program. For up to twice this rank a program
takes half the columns.
"""
WALK = dict(ROWS=32, COLUMNS=128, STAGES=4, num_warps=8, maxnreg=128)
"""The launch shape: rows of an iteration, columns of a program, and the number of iterations whose loads overlap. With
128 registers a thread, two programs fit on a processor: one computes while the other waits.
"""
SHARED_MEMORY = 2**17
"""Bytes of shared memory that four overlapping iterations need. A processor with less memory overlaps three."""
SLOTS = 264
"""Programs that run at once: two for each processor of an H200. It is a constant, so that all GPUs add up in the same
order.
"""
MOST_PARTS, LEAST_ROWS = 8, 512


def backward(
    act: str,
    gate_up: Tensor,
    dp: Tensor,
    out: Tensor,
    xa: Tensor,
    dyb: Tensor,
    ranks: tuple[int, int, int],
    totals: tuple[Tensor | None, Tensor | None],
    factors: tuple[Tensor, Tensor],
    keep_p: bool = False,
) -> tuple[Tensor, Tensor]:
    """Write [dgate | dup] to `out` and return the gradients of lora_B of gate and up and of lora_A of down.

    Both are float32 partial sums like lora_triton.reduce()'s, [parts, 2 width, R] and [parts, width, Q].

    Args:
        gate_up, out: [rows, 2 width], 16 bits. dp: [rows, width], the gradient of p; overwritten with p if `keep_p`.
        xa: [rows, R], x A^T of gate and up. dyb: [rows, Q], dy B of down. All have contiguous rows, with any gaps.
        ranks: the ranks of gate, up and down, each at most twice NARROW. Sums of gate with columns of up are not
            written, and the other way round.
        totals: the result of an earlier call, to which this call adds its sums, or twice None.
        factors: b [2 width, R] and a [Q, width]: xa b^T is added to gate_up, and dyb a to dp.
    """
    rows, width = dp.shape
    assert gate_up.shape == out.shape == (rows, 2 * width)
    assert len(xa) == len(dyb) == rows
    assert max(ranks) <= 2 * NARROW
    assert all(tensor.dtype.itemsize == 2 for tensor in (gate_up, dp, out, xa, dyb, *factors))
    shape = dict(WALK)
    if max(ranks) > NARROW:
        shape["COLUMNS"] //= 2
    if dp.is_cuda:
        gpu = triton.runtime.driver.active.utils.get_device_properties(dp.device.index)
        shape["STAGES"] = min(shape["STAGES"], 3 if gpu["max_shared_mem"] < SHARED_MEMORY else 4)
    blocks = triton.cdiv(width, shape["COLUMNS"])
    sum_b, sum_a = totals
    if sum_b is None or sum_a is None:
        count = _parts(rows, blocks)
        sum_b, sum_a = (
            torch.empty(count, size, columns, dtype=torch.float32, device=dp.device)
            for size, columns in ((2 * width, xa.shape[1]), (width, dyb.shape[1]))
        )
    parts = len(sum_b)
    assert (sum_b.shape[1:], sum_a.shape) == ((2 * width, xa.shape[1]), (parts, width, dyb.shape[1]))
    part_rows = triton.cdiv(triton.cdiv(rows, parts), shape["ROWS"]) * shape["ROWS"]
    _backward[(blocks, parts)](
        *map(matrix, (gate_up, dp, out, xa, dyb, *factors)), sum_b, sum_a, rows, width, ranks, xa.shape[1],
        dyb.shape[1], part_rows,
        SILU=act == "silu", KEEP=keep_p, ADD=totals[0] is not None, RANKS=rank_block(max(ranks[:2])),
        DOWN=rank_block(ranks[2]), **shape,
    )  # fmt: skip
    return sum_b, sum_a


def _parts(rows: int, blocks: int) -> int:
    """The number of parts of the rows with which the fewest slots are idle in the last wave of programs."""
    most = max(min(MOST_PARTS, rows // LEAST_ROWS), 1)
    return min(range(1, most + 1), key=lambda parts: (-(-blocks * parts // SLOTS) * SLOTS / (blocks * parts), parts))


@triton.jit
def _tile(x, first, row, column, inside):
    """A tile of `x` whose first number is at `first`."""
    return tl.load(x[0] + first + (row * x[1] + column), mask=inside, other=0.0)


@triton.jit
def _store(pointer, row, column, across, total, width, ranks, ADD: tl.constexpr):
    """Write a block of sums, [COLUMNS, RANKS]. `across`: the distance between the sums of two columns."""
    inside = (column < width) & (row < ranks)
    at = pointer + column.to(tl.int64) * across + row
    if ADD:
        total += tl.load(at, mask=inside, other=0.0)
    tl.store(at, total, mask=inside)


@triton.jit
def _backward(
    gate_up, dp, out, xa, dyb, b, a, into_b, into_a,
    rows, width, ranks, wide_b, wide_a, part_rows,
    SILU: tl.constexpr, KEEP: tl.constexpr, ADD: tl.constexpr, RANKS: tl.constexpr, DOWN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    gate_rank, up_rank, down_rank = ranks
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    column = columns[None, :]
    step = tl.arange(0, ROWS)[:, None]
    part = tl.program_id(1)
    first = part * part_rows
    last = tl.minimum(first + part_rows, rows)
    rank, down = tl.arange(0, RANKS), tl.arange(0, DOWN)
    kind = out[0].dtype.element_ty
    b_at = b[0] + column.to(tl.int64) * b[1] + rank[:, None]
    b_gate = tl.load(b_at, mask=(rank[:, None] < gate_rank) & (column < width), other=0.0)
    b_at += tl.cast(width, tl.int64) * b[1] + gate_rank
    b_up = tl.load(b_at, mask=(rank[:, None] < up_rank) & (column < width), other=0.0)
    a_at = a[0] + down[:, None].to(tl.int64) * a[1] + column
    a_down = tl.load(a_at, mask=(down[:, None] < down_rank) & (column < width), other=0.0)
    sum_gate = tl.zeros((COLUMNS, RANKS), tl.float32)
    sum_up = tl.zeros((COLUMNS, RANKS), tl.float32)
    sum_down = tl.zeros((COLUMNS, DOWN), tl.float32)
    for start in tl.range(first, last, ROWS, num_stages=STAGES):
        # Only the offset of a tile's first row is int64. Offsets within the tile are int32: half the registers.
        below, at = step < last - start, tl.cast(start, tl.int64)
        inside = below & (column < width)
        gate = _tile(gate_up, at * gate_up[1], step, column, inside).to(tl.float32)
        up = _tile(gate_up, at * gate_up[1] + width, step, column, inside).to(tl.float32)
        d_p = _tile(dp, at * dp[1], step, column, inside).to(tl.float32)
        xa_gate = _tile(xa, at * xa[1], step, rank[None, :], below & (rank[None, :] < gate_rank))
        xa_up = _tile(xa, at * xa[1] + gate_rank, step, rank[None, :], below & (rank[None, :] < up_rank))
        dyb_down = _tile(dyb, at * dyb[1], step, down[None, :], below & (down[None, :] < down_rank))
        gate = tl.dot(xa_gate, b_gate, gate)
        up = tl.dot(xa_up, b_up, up)
        d_p = tl.dot(dyb_down, a_down, d_p)
        value, slope = activation(gate, SILU)
        d_gate, d_up, p = (d_p * up * slope).to(kind), (d_p * value).to(kind), (value * up).to(kind)
        to = out[0] + at * out[1]
        tl.store(to + (step * out[1] + column), d_gate, mask=inside)
        tl.store(to + width + (step * out[1] + column), d_up, mask=inside)
        # Adding zero uses each sum, so the program waits for the product. Without it Triton (3.6 to 3.9) overwrites xa
        # and dyb with the next rows while the products still read them: an operand that is also read into registers
        # gets one buffer too few.
        sum_gate = tl.dot(tl.trans(d_gate), xa_gate, sum_gate) + 0.0
        sum_up = tl.dot(tl.trans(d_up), xa_up, sum_up) + 0.0
        sum_down = tl.dot(tl.trans(p), dyb_down, sum_down) + 0.0
        if KEEP:  # All threads have waited for each other at the products above, so all have read this part of dp.
            tl.store(dp[0] + at * dp[1] + (step * dp[1] + column), p, mask=inside)
    into_b += part.to(tl.int64) * 2 * width * wide_b
    _store(into_b, rank[None, :], columns[:, None], wide_b, sum_gate, width, gate_rank, ADD)
    into_b += tl.cast(width, tl.int64) * wide_b + gate_rank
    _store(into_b, rank[None, :], columns[:, None], wide_b, sum_up, width, up_rank, ADD)
    into_a += part.to(tl.int64) * width * wide_a
    _store(into_a, down[None, :], columns[:, None], wide_a, sum_down, width, down_rank, ADD)
