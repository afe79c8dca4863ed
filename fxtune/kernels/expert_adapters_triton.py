"""Triton kernels of gated_experts.py and fp8_experts.py for the products of experts' adapters, which have low rank.

    project           multiplies the state of each row's token by a narrow matrix of the row's expert
    expand            multiplies narrow rows by a matrix of their expert
    outer             adds up the outer products of an expert's rows, for the gradients of adapters

project() and outer() read tokens' states in place, once for each of a token's experts. The cache holds almost all
states, so it serves most reads. _tile_of() of gated_experts_triton.py finds a program's tile of rows. Import this
module only on a GPU.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fxtune.kernels.gated_experts_triton import IEEE, _grid, _tile_of
from fxtune.kernels.triton_parts import matrix, rank_block

PROJECT = dict(ROWS=128, COLUMNS=64, num_warps=4, num_stages=3)
EXPAND = dict(ROWS=64, COLUMNS=128, num_warps=4)
OUTER = dict(ROWS=64, COLUMNS=128, num_warps=4, num_stages=3)
"""Launch shapes. PROJECT and OUTER are the fastest of 54 on an H200, for 131,072 rows of 128 experts and 2,048
columns. EXPAND is not measured."""


def project(states: Tensor, token: Tensor, factor: Tensor, ends: Tensor) -> Tensor:
    """See gated_experts.project()."""
    states, (experts, width, ranks) = states.contiguous(), factor.shape
    out = states.new_empty(len(token), ranks)
    _project[_grid(len(token), ends, PROJECT)](
        states, token, factor, *factor.stride(), out, ends, width, ranks, experts,
        RANKS=rank_block(ranks), EXPERTS=triton.next_power_of_2(experts), **PROJECT,
    )  # fmt: skip
    return out


def expand(narrow: Tensor, factor: Tensor, ends: Tensor) -> Tensor:
    """See fp8_experts.expand()."""
    narrow, (experts, ranks, columns) = narrow.contiguous(), factor.shape
    out = narrow.new_empty(len(narrow), columns)
    across = triton.cdiv(columns, EXPAND["COLUMNS"])
    _expand[(_grid(len(narrow), ends, EXPAND)[0] * across,)](
        narrow, factor, *factor.stride(), out, ends, columns, ranks, experts,
        RANKS=rank_block(ranks), EXPERTS=triton.next_power_of_2(experts), **EXPAND,
    )  # fmt: skip
    return out


def outer(states: Tensor, token: Tensor | None, narrow: Tensor, ends: Tensor) -> Tensor:
    """See gated_experts.outer_of()."""
    states = states if states.stride(1) == 1 else states.contiguous()
    narrow, width, ranks = narrow.contiguous(), states.shape[1], narrow.shape[1]
    out = states.new_empty(len(ends), width, ranks)
    grid = triton.cdiv(width, OUTER["COLUMNS"]), len(ends)
    _outer[grid](
        matrix(states), ends if token is None else token, narrow, out, ends, width, ranks,
        GATHER=token is not None, RANKS=rank_block(ranks), **OUTER,
    )  # fmt: skip
    return out


@triton.jit
def _project(
    states, token, factor, by_expert, by_column, by_rank, out, ends, width, ranks, experts,
    RANKS: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    expert, first, end = _tile_of(ends, tl.program_id(0), experts, ROWS, EXPERTS)
    if expert >= experts:
        return
    row = first.to(tl.int64) + tl.arange(0, ROWS)
    rank = tl.arange(0, RANKS)[None, :]
    source = tl.load(token + row, mask=row < end, other=0).to(tl.int64)
    total = tl.zeros((ROWS, RANKS), tl.float32)
    factor += expert.to(tl.int64) * by_expert
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = (row[:, None] < end) & (column[None, :] < width)
        x = tl.load(states + source[:, None] * width + column[None, :], mask=inside, other=0.0)
        narrow = (column[:, None] < width) & (rank < ranks)
        f = tl.load(factor + column[:, None] * by_column + rank * by_rank, mask=narrow, other=0.0)
        total = tl.dot(x, f, total, input_precision=IEEE)
    tl.store(
        out + row[:, None] * ranks + rank, total.to(out.dtype.element_ty), mask=(row[:, None] < end) & (rank < ranks)
    )


@triton.jit
def _expand(
    narrow, factor, by_expert, by_rank, by_column, out, ends, columns, ranks, experts,
    RANKS: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    across = (columns + COLUMNS - 1) // COLUMNS
    expert, first, end = _tile_of(ends, tl.program_id(0) // across, experts, ROWS, EXPERTS)
    if expert >= experts:
        return
    row = first.to(tl.int64) + tl.arange(0, ROWS)[:, None]
    column = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    total = low_product(narrow, factor, by_expert, by_rank, by_column, expert, row, end, column, columns, ranks,
                 tl.zeros((ROWS, COLUMNS), tl.float32), RANKS)  # fmt: skip
    tl.store(out + row * columns + column, total.to(out.dtype.element_ty), mask=(row < end) & (column < columns))


@triton.jit
def low_product(narrow, factor, by_expert, by_rank, by_column, expert, row, end, column, columns, ranks, total,
         RANKS: tl.constexpr):  # fmt: skip
    """`total` plus the product of a tile of `narrow` and the expert's factor."""
    rank = tl.arange(0, RANKS)
    r = tl.load(narrow + row * ranks + rank[None, :], mask=(row < end) & (rank[None, :] < ranks), other=0.0)
    f = tl.load(
        factor + expert.to(tl.int64) * by_expert + rank[:, None] * by_rank + column * by_column,
        mask=(rank[:, None] < ranks) & (column < columns),
        other=0.0,
    )
    return tl.dot(r, f, total, input_precision=IEEE)


@triton.jit
def _outer(
    states, token, narrow, out, ends, width, ranks,
    GATHER: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1)
    begin = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends + expert)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    rank = tl.arange(0, RANKS)[None, :]
    total = tl.zeros((COLUMNS, RANKS), tl.float32)
    for first in range(begin, end, ROWS):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        source = tl.load(token + row, mask=row < end, other=0).to(tl.int64) if GATHER else row
        inside = (row[:, None] < end) & (column[None, :] < width)
        x = tl.load(states[0] + source[:, None] * states[1] + column[None, :], mask=inside, other=0.0)
        y = tl.load(narrow + row[:, None] * ranks + rank, mask=(row[:, None] < end) & (rank < ranks), other=0.0)
        total = tl.dot(tl.trans(x), y, total, input_precision=IEEE)
    out += expert.to(tl.int64) * width * ranks
    inside = (column[:, None] < width) & (rank < ranks)
    tl.store(out + column[:, None] * ranks + rank, total.to(out.dtype.element_ty), mask=inside)
