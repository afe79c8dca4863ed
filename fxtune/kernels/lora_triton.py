"""Triton kernels of fused LoRA: the adapters' work besides the frozen weights' matmul.

    pack        writes A and B of all siblings, scaled and cast, into the matmul's operands: one small launch
    project     computes t = x F [rows, rank] in one pass over x, which also writes [x | t] into the matmul's operand
    reduce      computes x^T t [width of x, rank], a sum over all rows; the rows are cut into parts to fill the GPU
    add         adds t F to y in one pass over y, which can also add the residual stream
    unpack      adds up the parts and writes the gradient of each lora_A and lora_B, scaled: one small launch

project, reduce and add are bound by memory. cuBLAS treats such shapes as compute-bound: it does not split the sum, and
may have 32 tiles for a GPU of 132 processors. Parts are added up in a fixed order, so results are the same bits each
time. The kernels are for 16-bit numbers (on tensor cores float32 would be TF32). Import this module only on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fxtune.kernels.triton_parts import load, matrix, rank_block, store

COLUMNS = 1024
"""Columns of A for each program of pack."""
NUMBERS = 2048
"""Numbers of B for each program of pack, and of a gradient for each program of unpack."""
PROJECT = dict(ROWS=64, STEP=128, num_warps=4, num_stages=3)
REDUCE = dict(COLUMNS=128, STEP=64, num_warps=4, num_stages=4)
ADD = dict(ROWS=64, COLUMNS=128, TILES=1, num_warps=4)
"""The launch of add: rows and columns of a tile, and how many tiles, one below the other, a program handles."""
PROGRAMS = 264
"""The number of programs that reduce() aims at: two for each processor of an H200."""
LEAST_ROWS = 256
"""The fewest rows of a part of reduce()."""


def pack(
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    scaling: Sequence[float],
    bias: Tensor | None,
    into_a: Tensor,
    into_b: Tensor,
) -> None:
    """Write all of `into_a` [R, in] and `into_b` [out, R]. `bias` [out] becomes the column of `into_b` after the
    ranks' columns."""
    width = len(into_a)
    blocks = width * triton.cdiv(into_a.shape[1], COLUMNS)
    targets = matrix(into_a), matrix(into_b), into_b if bias is None else bias
    _for_siblings(_pack, a, b, scaling, targets, width, blocks, BIAS=bias is not None, COLUMNS=COLUMNS)


def unpack(
    da: Tensor | None, db: Tensor | None, scaling: Sequence[float], grad_a: Sequence[Tensor], grad_b: Sequence[Tensor]
) -> None:
    """Add up `da` [parts, in, R] and `db` [parts, out, R], float32, into the gradients of each lora_A and (scaled)
    lora_B. If `da` or `db` is None, the gradients of lora_A or of lora_B do not change.
    """
    sums = da if da is not None else db
    assert sums is not None
    sums_a, sums_b = (sums if total is None else total for total in (da, db))
    width = sums.shape[2]
    blocks = 0 if da is None else triton.cdiv(da.shape[1], _rows(width))
    totals = sums_a, sums_b, len(sums_a), len(sums_b)
    _for_siblings(_unpack, grad_a, grad_b, scaling, totals, width, blocks, B=db is not None)


def _for_siblings(
    kernel: Any,
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    scaling: Sequence[float],
    totals: tuple[Any, ...],
    width: int,
    blocks_a: int,
    **flags: Any,
) -> None:
    """Launch `kernel` with `blocks_a` programs for A, then with programs for B that handle _rows() rows each."""
    assert all(factor.is_contiguous() for factor in (*a, *b))
    ranks, outs = tuple(map(len, a)), tuple(map(len, b))
    out, rows = sum(outs), _rows(width)
    if total := blocks_a + (triton.cdiv(out, rows) if flags.get("B", True) else 0):
        siblings = tuple(a), tuple(b), tuple(map(float, scaling)), ranks, outs
        sizes = dict(COUNT=len(a), ROWS=rows, WIDTH=triton.next_power_of_2(width))
        kernel[(total,)](*siblings, *totals, a[0].shape[1], out, width, blocks_a, **sizes, **flags)


def _rows(width: int) -> int:
    """How many rows of `width` numbers each program of pack and unpack handles."""
    return max(NUMBERS // triton.next_power_of_2(width), 1)


def project(
    x: Tensor,
    factor: Tensor,
    left: Tensor | None = None,
    right: Tensor | None = None,
    ones: int = -1,
    value: float = 1.0,
) -> Tensor:
    """x F [rows, R] in x's dtype, for `x` [rows, width] with contiguous rows and `factor` [width, R] of any strides.

    x is copied to `left` [rows, width], and the product also written to `right` [rows, R], if they are given. Column
    `ones` of the product is replaced by `value`. R is a multiple of 16.
    """
    (rows, width), columns = x.shape, factor.shape[1]
    assert x.dtype.itemsize == 2, x.dtype
    product = x.new_empty(rows, columns)
    if rows:
        _project[(triton.cdiv(rows, PROJECT["ROWS"]),)](
            matrix(x), (factor, *factor.stride()), product, (x, 0) if left is None else matrix(left),
            (product, 0) if right is None else matrix(right), rows, width, columns, ones, float(value),
            LEFT=left is not None, RIGHT=right is not None, WIDTH=rank_block(columns), **PROJECT,
        )  # fmt: skip
    return product


def reduce(x: Tensor, t: Tensor, into: Tensor | None = None) -> Tensor:
    """x^T t as partial sums, float32 [parts, width, R], for `x` [rows, width] and `t` [rows, R] with contiguous rows.

    `into`: the result of an earlier call, with any number of rows. This call adds its sums to the parts of `into`.
    """
    (rows, width), columns = x.shape, t.shape[1]
    assert x.dtype.itemsize == 2, x.dtype
    blocks = triton.cdiv(width, REDUCE["COLUMNS"])
    parts = len(into) if into is not None else max(min(-(-PROGRAMS // blocks), rows // LEAST_ROWS), 1)
    part_rows = triton.cdiv(triton.cdiv(rows, parts), REDUCE["STEP"]) * REDUCE["STEP"]
    sums = into if into is not None else torch.empty(parts, width, columns, dtype=torch.float32, device=x.device)
    _reduce[(blocks, parts)](
        matrix(x), matrix(t), sums, rows, width, columns, part_rows,
        ADD=into is not None, WIDTH=rank_block(columns), **REDUCE,
    )  # fmt: skip
    return sums


def add(y: Tensor, t: Tensor, factor: Tensor, out: Tensor, residual: Tensor | None = None) -> Tensor:
    """Write y + t F, added in float32 and rounded, to `out`, which may be y, and return it.

    `residual` is added to the rounded sum, and the result is rounded again, as by a separate operator. y is already
    rounded, so y + residual may lie on a rounding tie. With a single rounding even a tiny t F would decide this tie.

    `y`, `out`, `residual`: [rows, width], `t`: [rows, R], all of 16 bits with contiguous rows; `factor`: [R, width] of
    any strides.
    """
    (rows, width), ranks = y.shape, len(factor)
    stream = y if residual is None else residual
    assert (t.shape, factor.shape[1], y.dtype.itemsize) == ((rows, ranks), width, 2)
    assert out.shape == stream.shape == y.shape
    assert out.dtype == stream.dtype == y.dtype
    if rows:
        _add[(triton.cdiv(width, ADD["COLUMNS"]), triton.cdiv(rows, ADD["ROWS"] * ADD["TILES"]))](
            matrix(y), matrix(t), (factor, *factor.stride()), matrix(stream), matrix(out), rows, width, ranks,
            RESIDUAL=residual is not None, RANKS=rank_block(ranks), **ADD,
        )  # fmt: skip
    return out


# Tuples of the kernels, with an entry for each sibling: a, b: lora_A, lora_B or their gradients; s: scaling; r: rank;
# o: outputs.


@triton.jit
def _pack(
    a, b, s, r, o, into_a, into_b, bias, inner, out, width, blocks_a,
    BIAS: tl.constexpr, COUNT: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if program < blocks_a:
        _pack_a(program, a, r, into_a, inner, width, COUNT, COLUMNS)
    else:
        _pack_b(program - blocks_a, b, s, r, o, into_b, bias, out, width, BIAS, COUNT, ROWS, WIDTH)


@triton.jit
def _pack_a(program, a, r, into, inner, width, COUNT: tl.constexpr, COLUMNS: tl.constexpr):
    row = program % width
    columns = (program // width) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < inner
    value = _row(a[0], row, r[0], inner, columns)
    own = row
    for index in tl.static_range(1, COUNT):
        own -= r[index - 1]
        value += _row(a[index], own, r[index], inner, columns)
    store(into, row.to(tl.int64), columns, value, inside)


@triton.jit
def _row(pointer, row, ranks, inner, columns):
    """A row of a sibling's A, or zeros if the row belongs to another sibling."""
    length = tl.where(row >= 0, tl.where(row < ranks, inner, 0), 0)
    return tl.load(pointer + row.to(tl.int64) * inner + columns, mask=columns < length, other=0.0).to(tl.float32)


@triton.jit
def _pack_b(
    program, b, s, r, o, into, bias, out, width,
    BIAS: tl.constexpr, COUNT: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    rows = program * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, WIDTH)[None, :]
    value = _block(b[0], rows, columns, o[0], r[0]) * s[0]
    own_rows, own_columns, after = rows, columns, r[0]
    for index in tl.static_range(1, COUNT):
        own_rows, own_columns = own_rows - o[index - 1], own_columns - r[index - 1]
        value += _block(b[index], own_rows, own_columns, o[index], r[index]) * s[index]
        after += r[index]
    if BIAS:
        offset = tl.load(bias + rows, mask=rows < out, other=0.0).to(tl.float32)
        value += tl.where(columns == after, offset, 0.0)
    store(into, rows.to(tl.int64), columns, value, (rows < out) & (columns < width))


@triton.jit
def _block(pointer, rows, columns, outs, ranks):
    """A block of a sibling's B, or zeros where rows or columns belong to another sibling."""
    inside = (rows >= 0) & (rows < outs) & (columns >= 0) & (columns < ranks)
    return tl.load(pointer + rows.to(tl.int64) * ranks + columns, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _unpack(
    a, b, s, r, o, total_a, total_b,
    parts_a, parts_b, inner, out, width, blocks_a,
    B: tl.constexpr, COUNT: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if program < blocks_a:
        _unpack_a(program, a, r, total_a, parts_a, inner, width, COUNT, ROWS, WIDTH)
    else:
        _unpack_b(program - blocks_a, b, s, r, o, total_b, parts_b, out, width, COUNT, ROWS, WIDTH)


@triton.jit
def _unpack_a(program, a, r, total, parts, inner, width, COUNT: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    value, rows, columns = _added(program, total, parts, inner, width, ROWS, WIDTH)
    for index in tl.static_range(COUNT):
        _write(a[index], rows, columns, inner, r[index], 1, inner, value)
        columns -= r[index]


@triton.jit
def _unpack_b(
    program, b, s, r, o, total, parts, out, width, COUNT: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    value, rows, columns = _added(program, total, parts, out, width, ROWS, WIDTH)
    for index in tl.static_range(COUNT):
        _write(b[index], rows, columns, o[index], r[index], r[index], 1, value * s[index])
        rows, columns = rows - o[index], columns - r[index]


@triton.jit
def _added(program, whole, parts, length, width, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Add up all parts [length, width], in the rows of this program."""
    rows = program * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, WIDTH)[None, :]
    inside = (rows < length) & (columns < width)
    value = tl.zeros((ROWS, WIDTH), tl.float32)
    for part in range(parts):
        value += tl.load(whole + (part * length + rows).to(tl.int64) * width + columns, mask=inside, other=0.0)
    return value, rows, columns


@triton.jit
def _write(pointer, rows, columns, outs, ranks, down, across, value):
    """Write this sibling's part of a block, with the strides `down` and `across`."""
    inside = (rows >= 0) & (rows < outs) & (columns >= 0) & (columns < ranks)
    at = pointer + rows.to(tl.int64) * down + columns.to(tl.int64) * across
    tl.store(at, value.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def _project(
    x, factor, product_ptr, left, right, rows, width, columns, ones, value,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    for start in range(0, width, STEP):
        across, down = start + tl.arange(0, STEP)[None, :], start + tl.arange(0, STEP)[:, None]
        inside = (row < rows) & (across < width)
        tile = load(x, row, across, inside)
        part = tl.load(
            factor[0] + down.to(tl.int64) * factor[1] + column * factor[2],
            mask=(down < width) & (column < columns),
            other=0.0,
        )
        total = tl.dot(tile, part, total)
        if LEFT:
            # x is read again, from the cache. If `tile` were stored, Triton (3.6 to 3.9) would give the tiles one
            # buffer too few in shared memory, and a later tile would overwrite an operand of a running product.
            again = tl.load(x[0] + row * x[1] + across, mask=inside, other=0.0, cache_modifier=".cg")
            store(left, row, across, again, inside)
    total = tl.where(column == ones, value, total)
    product = total.to(product_ptr.dtype.element_ty)
    inside = (row < rows) & (column < columns)
    tl.store(product_ptr + row * columns + column, product, mask=inside)
    if RIGHT:
        store(right, row, column, product, inside)


@triton.jit
def _reduce(
    x, t, into_ptr, rows, width, columns, part_rows,
    ADD: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    across = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.program_id(1)
    column = tl.arange(0, WIDTH)
    first = part * part_rows
    last = tl.minimum(first + part_rows, rows)
    total = tl.zeros((COLUMNS, WIDTH), tl.float32)
    for start in range(first, last, STEP):
        row = (start + tl.arange(0, STEP)).to(tl.int64)[:, None]
        left = load(x, row, across[None, :], (row < last) & (across[None, :] < width))
        right = load(t, row, column[None, :], (row < last) & (column[None, :] < columns))
        total = tl.dot(tl.trans(left), right, total)
    at = into_ptr + (part.to(tl.int64) * width + across[:, None]) * columns + column[None, :]
    inside = (across[:, None] < width) & (column[None, :] < columns)
    if ADD:
        total += tl.load(at, mask=inside, other=0.0)
    tl.store(at, total, mask=inside)


@triton.jit
def _add(
    y, t, factor, residual, out, rows, width, ranks,
    RESIDUAL: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    rank = tl.arange(0, RANKS)
    right = tl.load(
        factor[0] + rank[:, None] * factor[1] + column.to(tl.int64) * factor[2],
        mask=(rank[:, None] < ranks) & (column < width),
        other=0.0,
    )
    # Programs begin with the last rows: a matmul has just written y, and the cache still holds its end.
    last = tl.num_programs(1) - 1 - tl.program_id(1)
    for tile in range(TILES):
        row = ((last * TILES + tile).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
        inside = (row < rows) & (column < width)
        value = load(y, row, column, inside)
        left = load(t, row, rank[None, :], (row < rows) & (rank[None, :] < ranks))
        total = value.to(tl.float32) + tl.dot(left, right)
        if RESIDUAL:
            stream = load(residual, row, column, inside)
            total = total.to(out[0].dtype.element_ty).to(tl.float32) + stream.to(tl.float32)
        store(out, row, column, total, inside)
