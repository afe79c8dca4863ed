"""Triton kernels of fused LoRA: the adapters' work besides the frozen weights' matmul.

    pack        writes A and B of all siblings, scaled and cast, into the matmul's operands: one small launch
    project     t = x F, rank wide, in one pass over x that also writes x, and t next to it, into the matmul's operand
    reduce      x^T t, [width of x, rank]: a sum over all rows, cut into parts so that it fills the GPU
    add         y += t F, in one pass over y, with the residual stream if that is added next
    unpack      adds up the parts and writes the gradient of each lora_A and lora_B, scaled: one small launch

project, reduce and add are bound by memory. cuBLAS treats such shapes as compute-bound: it does not split the sum, so
a GPU of 132 processors gets 32 tiles. Parts are added up in a fixed order, so results are the same bits each time. The
kernels are for 16-bit numbers (on tensor cores float32 would be TF32) and at most SIBLINGS linears in a group. Import
this module only on a GPU: torch's CPU builds do not include triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

SIBLINGS = 4
COLUMNS = 1024
"""Columns of A for each program of pack."""
NUMBERS = 2048
"""Numbers of B, and of all gradients, for each program of pack or unpack."""
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
    bias: Optional[Tensor],
    into_a: Tensor,
    into_b: Tensor,
) -> None:
    """Write all of `into_a` [R, in] and `into_b` [out, R]. `bias` [out] is the column after the ranks."""
    width = len(into_a)
    blocks = width * triton.cdiv(into_a.shape[1], COLUMNS)
    _for_siblings(
        _pack,
        a,
        b,
        scaling,
        into_a,
        into_b,
        bias if bias is not None else into_b,
        into_a.stride(0),
        into_b.stride(0),
        width,
        blocks,
        BIAS=bias is not None,
        COLUMNS=COLUMNS,
    )


def unpack(
    da: Optional[Tensor],
    db: Optional[Tensor],
    scaling: Sequence[float],
    grad_a: Sequence[Tensor],
    grad_b: Sequence[Tensor],
) -> None:
    """Add up `da` [parts, in, R] and `db` [parts, out, R], float32, into the gradients of each lora_A and (scaled)
    lora_B.

    None: those gradients do not change.
    """
    some = da if da is not None else db
    assert some is not None
    one, two = (some if given is None else given for given in (da, db))
    blocks = triton.cdiv(one.shape[1], _rows(one.shape[2])) if da is not None else 0
    _for_siblings(
        _unpack, grad_a, grad_b, scaling, one, two, some, len(one), len(two), one.shape[2], blocks, B=db is not None
    )


def _for_siblings(
    kernel: Any,
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    scaling: Sequence[float],
    total_a: Tensor,
    total_b: Tensor,
    third: Tensor,
    number_a: int,
    number_b: int,
    width: int,
    blocks_a: int,
    **flags: Any,
) -> None:
    """Launch `kernel` with `blocks_a` programs for A, then with programs for B that handle _rows() rows each."""
    count, inner = len(a), a[0].shape[1]
    assert 0 < count <= SIBLINGS, count
    assert all(one.is_contiguous() for one in (*a, *b))
    # The first sibling fills the unused arguments; the kernels do not read them.
    a, b, scaling = ([*one, *[one[0]] * (SIBLINGS - count)] for one in (a, b, scaling))
    ranks, outs = [len(one) for one in a], [len(one) for one in b]
    out, rows = sum(outs[:count]), _rows(width)
    if total := blocks_a + (triton.cdiv(out, rows) if flags.get("B", True) else 0):
        kernel[(total,)](
            *a,
            *b,
            *map(float, scaling),
            *ranks,
            *outs,
            total_a,
            total_b,
            third,
            number_a,
            number_b,
            inner,
            out,
            width,
            blocks_a,
            COUNT=count,
            ROWS=rows,
            WIDTH=triton.next_power_of_2(width),
            **flags,
        )


def _rows(width: int) -> int:
    """How many rows of `width` numbers each program of pack and unpack handles."""
    return max(NUMBERS // triton.next_power_of_2(width), 1)


def project(
    x: Tensor,
    factor: Tensor,
    left: Optional[Tensor] = None,
    right: Optional[Tensor] = None,
    ones: int = -1,
    value: float = 1.0,
) -> Tensor:
    """x F [rows, R] in x's dtype, for `x` [rows, width] with contiguous rows and `factor` [width, R] of any strides.

    `left` [rows, width]: x is copied there. `right` [rows, R]: the product is also written there. `ones`: a column of
    the product that is `value` instead. R is a multiple of 16.
    """
    (rows, width), columns = x.shape, factor.shape[1]
    assert (x.stride(1), x.dtype.itemsize) == (1, 2), (x.stride(), x.dtype)
    product = x.new_empty(rows, columns)
    if rows:
        _project[(triton.cdiv(rows, PROJECT["ROWS"]),)](
            x,
            x.stride(0),
            factor,
            *factor.stride(),
            product,
            left if left is not None else x,
            left.stride(0) if left is not None else 0,
            right if right is not None else product,
            right.stride(0) if right is not None else 0,
            rows,
            width,
            columns,
            ones,
            float(value),
            LEFT=left is not None,
            RIGHT=right is not None,
            WIDTH=max(triton.next_power_of_2(columns), 16),
            **PROJECT,
        )
    return product


def reduce(x: Tensor, t: Tensor, into: Optional[Tensor] = None) -> Tensor:
    """x^T t as partial sums, float32 [parts, width, R], for `x` [rows, width] and `t` [rows, R] with contiguous rows.

    `into`: the result of an earlier call, with any number of rows, to whose parts the sums are added.
    """
    (rows, width), columns = x.shape, t.shape[1]
    assert (x.stride(1), t.stride(1), x.dtype.itemsize) == (1, 1, 2), (x.stride(), t.stride(), x.dtype)
    blocks = triton.cdiv(width, REDUCE["COLUMNS"])
    parts = len(into) if into is not None else max(min(-(-PROGRAMS // blocks), rows // LEAST_ROWS), 1)
    each = triton.cdiv(triton.cdiv(rows, parts), REDUCE["STEP"]) * REDUCE["STEP"]
    made = into if into is not None else torch.empty(parts, width, columns, dtype=torch.float32, device=x.device)
    _reduce[(blocks, parts)](
        x,
        x.stride(0),
        t,
        t.stride(0),
        made,
        rows,
        width,
        columns,
        each,
        ADD=into is not None,
        WIDTH=max(triton.next_power_of_2(columns), 16),
        **REDUCE,
    )
    return made


def add(y: Tensor, t: Tensor, factor: Tensor, out: Tensor, residual: Optional[Tensor] = None) -> Tensor:
    """Write y + t F, added in float32 and rounded, to `out`, which may be y, and return it.

    `residual` is added to that, and the sum is rounded again, as a separate operator would do. y is rounded already,
    so with a single rounding even a tiny t F would decide each sum of y and residual that lies on a rounding tie.

    `y`, `out`, `residual`: [rows, width], `t`: [rows, R], all of 16 bits with contiguous rows; `factor`: [R, width] of
    any strides.
    """
    (rows, width), ranks = y.shape, len(factor)
    assert (t.shape, factor.shape[1], y.stride(1), t.stride(1), y.dtype.itemsize) == ((rows, ranks), width, 1, 1, 2)
    more = y if residual is None else residual
    assert (out.shape, out.stride(1), out.dtype) == (more.shape, more.stride(1), more.dtype) == (y.shape, 1, y.dtype)
    if rows:
        _add[(triton.cdiv(width, ADD["COLUMNS"]), triton.cdiv(rows, ADD["ROWS"] * ADD["TILES"]))](
            y,
            y.stride(0),
            t,
            t.stride(0),
            factor,
            *factor.stride(),
            more,
            more.stride(0),
            out,
            out.stride(0),
            rows,
            width,
            ranks,
            MORE=residual is not None,
            RANKS=max(triton.next_power_of_2(ranks), 16),
            **ADD,
        )
    return out


@triton.jit
def _pack(
    a0,
    a1,
    a2,
    a3,
    b0,
    b1,
    b2,
    b3,
    s0,
    s1,
    s2,
    s3,
    r0,
    r1,
    r2,
    r3,
    o0,
    o1,
    o2,
    o3,
    into_a,
    into_b,
    bias,
    stride_a,
    stride_b,
    inner,
    out,
    width,
    blocks_a,
    BIAS: tl.constexpr,
    COUNT: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    program = tl.program_id(0)
    if program < blocks_a:
        _pack_a(program, a0, a1, a2, a3, r0, r1, r2, r3, into_a, stride_a, inner, width, COUNT, COLUMNS)
    else:
        _pack_b(
            program - blocks_a,
            b0,
            b1,
            b2,
            b3,
            s0,
            s1,
            s2,
            s3,
            r0,
            r1,
            r2,
            r3,
            o0,
            o1,
            o2,
            o3,
            into_b,
            bias,
            stride_b,
            out,
            width,
            BIAS,
            COUNT,
            ROWS,
            WIDTH,
        )


@triton.jit
def _pack_a(
    program, a0, a1, a2, a3, r0, r1, r2, r3, into_a, stride_a, inner, width, COUNT: tl.constexpr, COLUMNS: tl.constexpr
):
    row = program % width
    columns = (program // width) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < inner
    value = _row(a0, row, r0, inner, columns)
    if COUNT > 1:
        value += _row(a1, row - r0, r1, inner, columns)
    if COUNT > 2:
        value += _row(a2, row - r0 - r1, r2, inner, columns)
    if COUNT > 3:
        value += _row(a3, row - r0 - r1 - r2, r3, inner, columns)
    tl.store(into_a + row.to(tl.int64) * stride_a + columns, value.to(into_a.dtype.element_ty), mask=inside)


@triton.jit
def _row(pointer, row, ranks, inner, columns):
    """A row of a sibling's A, or zeros if the row is another sibling's."""
    length = tl.where(row >= 0, tl.where(row < ranks, inner, 0), 0)
    return tl.load(pointer + row.to(tl.int64) * inner + columns, mask=columns < length, other=0.0).to(tl.float32)


@triton.jit
def _pack_b(
    program,
    b0,
    b1,
    b2,
    b3,
    s0,
    s1,
    s2,
    s3,
    r0,
    r1,
    r2,
    r3,
    o0,
    o1,
    o2,
    o3,
    into_b,
    bias,
    stride_b,
    out,
    width,
    BIAS: tl.constexpr,
    COUNT: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    rows = program * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, WIDTH)[None, :]
    value = _block(b0, rows, columns, o0, r0) * s0
    after = r0
    if COUNT > 1:
        value += _block(b1, rows - o0, columns - r0, o1, r1) * s1
        after = r0 + r1
    if COUNT > 2:
        value += _block(b2, rows - o0 - o1, columns - r0 - r1, o2, r2) * s2
        after = r0 + r1 + r2
    if COUNT > 3:
        value += _block(b3, rows - o0 - o1 - o2, columns - r0 - r1 - r2, o3, r3) * s3
        after = r0 + r1 + r2 + r3
    if BIAS:
        offset = tl.load(bias + rows, mask=rows < out, other=0.0).to(tl.float32)
        value += tl.where(columns == after, offset, 0.0)
    tl.store(
        into_b + rows.to(tl.int64) * stride_b + columns,
        value.to(into_b.dtype.element_ty),
        mask=(rows < out) & (columns < width),
    )


@triton.jit
def _block(pointer, rows, columns, outs, ranks):
    """A block of a sibling's B, or zeros where rows or columns are another sibling's."""
    mine = (rows >= 0) & (rows < outs) & (columns >= 0) & (columns < ranks)
    return tl.load(pointer + rows.to(tl.int64) * ranks + columns, mask=mine, other=0.0).to(tl.float32)


@triton.jit
def _unpack(
    a0,
    a1,
    a2,
    a3,
    b0,
    b1,
    b2,
    b3,
    s0,
    s1,
    s2,
    s3,
    r0,
    r1,
    r2,
    r3,
    o0,
    o1,
    o2,
    o3,
    total_a,
    total_b,
    unused,
    parts_a,
    parts_b,
    inner,
    out,
    width,
    blocks_a,
    B: tl.constexpr,
    COUNT: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    program = tl.program_id(0)
    if program < blocks_a:
        _unpack_a(program, a0, a1, a2, a3, r0, r1, r2, r3, total_a, parts_a, inner, width, COUNT, ROWS, WIDTH)
    else:
        _unpack_b(
            program - blocks_a,
            b0,
            b1,
            b2,
            b3,
            s0,
            s1,
            s2,
            s3,
            r0,
            r1,
            r2,
            r3,
            o0,
            o1,
            o2,
            o3,
            total_b,
            parts_b,
            out,
            width,
            COUNT,
            ROWS,
            WIDTH,
        )


@triton.jit
def _unpack_a(
    program,
    a0,
    a1,
    a2,
    a3,
    r0,
    r1,
    r2,
    r3,
    total_a,
    parts_a,
    inner,
    width,
    COUNT: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    value, rows, columns = _added(program, total_a, parts_a, inner, width, ROWS, WIDTH)
    _write(a0, rows, columns, inner, r0, 1, inner, value)
    if COUNT > 1:
        _write(a1, rows, columns - r0, inner, r1, 1, inner, value)
    if COUNT > 2:
        _write(a2, rows, columns - r0 - r1, inner, r2, 1, inner, value)
    if COUNT > 3:
        _write(a3, rows, columns - r0 - r1 - r2, inner, r3, 1, inner, value)


@triton.jit
def _unpack_b(
    program,
    b0,
    b1,
    b2,
    b3,
    s0,
    s1,
    s2,
    s3,
    r0,
    r1,
    r2,
    r3,
    o0,
    o1,
    o2,
    o3,
    total_b,
    parts_b,
    out,
    width,
    COUNT: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    value, rows, columns = _added(program, total_b, parts_b, out, width, ROWS, WIDTH)
    _write(b0, rows, columns, o0, r0, r0, 1, value * s0)
    if COUNT > 1:
        _write(b1, rows - o0, columns - r0, o1, r1, r1, 1, value * s1)
    if COUNT > 2:
        _write(b2, rows - o0 - o1, columns - r0 - r1, o2, r2, r2, 1, value * s2)
    if COUNT > 3:
        _write(b3, rows - o0 - o1 - o2, columns - r0 - r1 - r2, o3, r3, r3, 1, value * s3)


@triton.jit
def _added(program, whole, parts, length, width, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The sum of all parts [length, width] in the rows of this program."""
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
    mine = (rows >= 0) & (rows < outs) & (columns >= 0) & (columns < ranks)
    at = pointer + rows.to(tl.int64) * down + columns.to(tl.int64) * across
    tl.store(at, value.to(pointer.dtype.element_ty), mask=mine)


@triton.jit
def _project(
    x_ptr,
    x_stride,
    factor_ptr,
    factor_down,
    factor_across,
    product_ptr,
    left_ptr,
    left_stride,
    right_ptr,
    right_stride,
    rows,
    width,
    columns,
    ones,
    value,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    for start in range(0, width, STEP):
        across, down = start + tl.arange(0, STEP)[None, :], start + tl.arange(0, STEP)[:, None]
        inside = (row < rows) & (across < width)
        x = tl.load(x_ptr + row * x_stride + across, mask=inside, other=0.0)
        factor = tl.load(
            factor_ptr + down.to(tl.int64) * factor_down + column * factor_across,
            mask=(down < width) & (column < columns),
            other=0.0,
        )
        total = tl.dot(x, factor, total)
        if LEFT:
            # x is read again, from the cache. If x itself were stored, Triton (3.6 to 3.9) would keep one buffer too
            # few for it in shared memory, and a later tile would overwrite the operand of a product that still runs.
            again = tl.load(x_ptr + row * x_stride + across, mask=inside, other=0.0, cache_modifier=".cg")
            tl.store(left_ptr + row * left_stride + across, again, mask=inside)
    total = tl.where(column == ones, value, total)
    product = total.to(product_ptr.dtype.element_ty)
    inside = (row < rows) & (column < columns)
    tl.store(product_ptr + row * columns + column, product, mask=inside)
    if RIGHT:
        tl.store(right_ptr + row * right_stride + column, product, mask=inside)


@triton.jit
def _reduce(
    x_ptr,
    x_stride,
    t_ptr,
    t_stride,
    into_ptr,
    rows,
    width,
    columns,
    each,
    ADD: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):
    across = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.program_id(1)
    column = tl.arange(0, WIDTH)
    first = part * each
    last = tl.minimum(first + each, rows)
    total = tl.zeros((COLUMNS, WIDTH), tl.float32)
    for start in range(first, last, STEP):
        row = (start + tl.arange(0, STEP)).to(tl.int64)[:, None]
        x = tl.load(x_ptr + row * x_stride + across[None, :], mask=(row < last) & (across[None, :] < width), other=0.0)
        t = tl.load(
            t_ptr + row * t_stride + column[None, :], mask=(row < last) & (column[None, :] < columns), other=0.0
        )
        total = tl.dot(tl.trans(x), t, total)
    at = into_ptr + (part.to(tl.int64) * width + across[:, None]) * columns + column[None, :]
    inside = (across[:, None] < width) & (column[None, :] < columns)
    if ADD:
        total += tl.load(at, mask=inside, other=0.0)
    tl.store(at, total, mask=inside)


@triton.jit
def _add(
    y_ptr,
    y_stride,
    t_ptr,
    t_stride,
    factor_ptr,
    factor_down,
    factor_across,
    more_ptr,
    more_stride,
    out_ptr,
    out_stride,
    rows,
    width,
    ranks,
    MORE: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILES: tl.constexpr,
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    rank = tl.arange(0, RANKS)
    factor = tl.load(
        factor_ptr + rank[:, None] * factor_down + column.to(tl.int64) * factor_across,
        mask=(rank[:, None] < ranks) & (column < width),
        other=0.0,
    )
    # From the last row to the first: a matmul has just written y, and the cache still holds its end.
    last = tl.num_programs(1) - 1 - tl.program_id(1)
    for tile in range(TILES):
        row = ((last * TILES + tile).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
        inside = (row < rows) & (column < width)
        y = tl.load(y_ptr + row * y_stride + column, mask=inside, other=0.0)
        t = tl.load(t_ptr + row * t_stride + rank[None, :], mask=(row < rows) & (rank[None, :] < ranks), other=0.0)
        total = y.to(tl.float32) + tl.dot(t, factor)
        if MORE:
            more = tl.load(more_ptr + row * more_stride + column, mask=inside, other=0.0)
            total = total.to(out_ptr.dtype.element_ty).to(tl.float32) + more.to(tl.float32)
        tl.store(out_ptr + row * out_stride + column, total.to(out_ptr.dtype.element_ty), mask=inside)
