"""Triton kernels of fp8.py and fp8_training.py. Each is one launch and one pass over memory.

    quantize_rows             computes the scale and the codes of each row; a program handles one row
    dequantize_rows           the inverse of quantize_rows; an fp8 head needs it in each step
    transpose                 transposes a matrix of bytes, for the backward product of a weight without `back`
    quantize_both             quantizes a matrix and its transpose with given factors, for trained weights

quantize_rows needs each row twice, because the scale depends on the row's largest number. A row that fits stays in
registers. A longer row is read again from the cache. All arithmetic is float32. Offsets are int64. Import this module
only on a GPU.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

SIDE = 128
"""Rows and columns that a program of transpose() and quantize_both() moves."""
HELD = 8192
"""How many numbers of a row quantize_rows keeps in registers at most. It reads longer rows twice: on an H200 that
is faster than keeping them."""


def quantize_rows(
    x: Tensor, codes: Tensor, scales: Tensor, smallest: float, powers: bool, columns: Tensor | None = None
) -> None:
    """Quantize `x` [rows, width] with contiguous rows into `codes`, e4m3 of that shape, and `scales`, float32 [rows].
    `columns`: float32 [width]; the columns of x are multiplied by these numbers before the scales are computed."""
    rows, width = x.shape
    assert x.stride(1) == codes.stride(1) == 1
    assert scales.is_contiguous()
    block = min(triton.next_power_of_2(width), HELD)
    if rows:
        _quantize_rows[(rows,)](
            x, x.stride(0), codes, codes.stride(0), scales, width, smallest,
            scales if columns is None else columns.contiguous(),
            POWERS=powers, SCALED=columns is not None, BLOCK=block, ONCE=block >= width,
            num_warps=16 if width > HELD else 8 if block > 1024 else 4,
        )  # fmt: skip


def transpose(x: Tensor, into: Tensor) -> None:
    """Write the transpose of `x` [rows, columns] to `into`. If both are [matrices, ...], transpose each matrix. Both
    are uint8, with contiguous rows."""
    if x.dim() == 2:
        x, into = x.unsqueeze(0), into.unsqueeze(0)
    matrices, rows, columns = x.shape
    assert x.stride(2) == into.stride(2) == 1
    grid = triton.cdiv(rows, SIDE), triton.cdiv(columns, SIDE), matrices
    _transpose[grid](
        x, x.stride(1), x.stride(0), into, into.stride(1), into.stride(0), rows, columns, SIDE=SIDE, num_warps=8
    )


def dequantize_rows(codes: Tensor, scales: Tensor, into: Tensor) -> Tensor:
    """Write `codes` (e4m3 [rows, width]) times `scales` (float32 [rows]) to `into`, all contiguous. Returns `into`."""
    rows, width = codes.shape
    assert all(tensor.is_contiguous() for tensor in (codes, scales, into))
    if rows:
        block = min(triton.next_power_of_2(width), 4096)
        _dequantize_rows[(rows, triton.cdiv(width, block))](codes, scales, into, width, BLOCK=block, num_warps=4)
    return into


def quantize_both(x: Tensor, factors: Tensor | None, codes: Tensor | None, back_factors: Tensor, back: Tensor) -> None:
    """Write x * factors to `codes` [rows, width], and the transpose of x * back_factors to `back` [width, rows or
    more], all in one pass over `x` [rows, width]. Both are e4m3; columns of `back` beyond the rows become zeros.

    The factors are float32, one for each row. Without `codes` and `factors`, both None, only `back` is written.
    """
    rows, width = x.shape
    across = back.shape[1]
    assert x.stride(1) == back.stride(1) == 1
    assert across >= rows
    assert codes is None or (codes.is_contiguous() and factors is not None and factors.is_contiguous())
    assert back_factors.is_contiguous()
    if across:
        _quantize_both[triton.cdiv(across, SIDE), triton.cdiv(width, SIDE)](
            x, x.stride(0), back_factors if factors is None else factors, back if codes is None else codes,
            back_factors, back, back.stride(0), rows, width, across,
            CODES=codes is not None, SIDE=SIDE, num_warps=8,
        )  # fmt: skip


@triton.jit
def _quantize_both(
    x, x_stride, factors, codes, back_factors, back, back_stride, rows, width, across,
    CODES: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * SIDE + tl.arange(0, SIDE)
    column = tl.program_id(1).to(tl.int64) * SIDE + tl.arange(0, SIDE)
    inside = (row[:, None] < rows) & (column[None, :] < width)
    tile = tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if CODES:
        factor = tl.load(factors + row, mask=row < rows, other=0.0)
        made = (tile * factor[:, None]).to(codes.dtype.element_ty)
        tl.store(codes + row[:, None] * width + column[None, :], made, mask=inside)
    factor = tl.load(back_factors + row, mask=row < rows, other=0.0)
    turned = tl.trans((tile * factor[:, None]).to(back.dtype.element_ty))
    into = (column[:, None] < width) & (row[None, :] < across)
    tl.store(back + column[:, None] * back_stride + row[None, :], turned, mask=into)


@triton.jit
def _quantize_rows(
    x_ptr, x_stride, codes_ptr, codes_stride, scales_ptr, width, smallest, factors_ptr,
    POWERS: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr, ONCE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    codes_ptr += row * codes_stride
    columns = tl.arange(0, BLOCK)
    if ONCE:
        x = tl.load(x_ptr + columns, mask=columns < width, other=0.0).to(tl.float32)
        if SCALED:
            x *= tl.load(factors_ptr + columns, mask=columns < width, other=0.0)
        scale = _scale(tl.max(tl.abs(x), 0), smallest, POWERS)
        tl.store(codes_ptr + columns, (x * (1.0 / scale)).to(codes_ptr.dtype.element_ty), mask=columns < width)
    else:
        largest = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, width, BLOCK):
            at = start + columns
            x = tl.load(x_ptr + at, mask=at < width, other=0.0, eviction_policy="evict_last").to(tl.float32)
            if SCALED:
                x *= tl.load(factors_ptr + at, mask=at < width, other=0.0)
            largest = tl.maximum(largest, tl.abs(x))
        scale = _scale(tl.max(largest, 0), smallest, POWERS)
        factor = 1.0 / scale
        for start in range(0, width, BLOCK):
            at = start + columns
            x = tl.load(x_ptr + at, mask=at < width, other=0.0, eviction_policy="evict_first").to(tl.float32)
            if SCALED:
                x *= tl.load(factors_ptr + at, mask=at < width, other=0.0)
            tl.store(codes_ptr + at, (x * factor).to(codes_ptr.dtype.element_ty), mask=at < width)
    tl.store(scales_ptr + row, scale)


@triton.jit
def _transpose(x, x_stride, x_size, into, into_stride, into_size, rows, columns, SIDE: tl.constexpr):
    x += tl.program_id(2).to(tl.int64) * x_size
    into += tl.program_id(2).to(tl.int64) * into_size
    row = tl.program_id(0).to(tl.int64) * SIDE + tl.arange(0, SIDE)
    column = tl.program_id(1).to(tl.int64) * SIDE + tl.arange(0, SIDE)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    tile = tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=0)
    tl.store(into + column[:, None] * into_stride + row[None, :], tl.trans(tile), mask=tl.trans(inside))


@triton.jit
def _dequantize_rows(codes_ptr, scales_ptr, into_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    codes = tl.load(codes_ptr + row * width + columns, mask=columns < width, other=0.0).to(tl.float32)
    tl.store(
        into_ptr + row * width + columns,
        (codes * tl.load(scales_ptr + row)).to(into_ptr.dtype.element_ty),
        mask=columns < width,
    )


@triton.jit
def _scale(largest, smallest, POWERS: tl.constexpr):
    """The scale of a row whose largest absolute value is `largest`. 448 is the largest number of e4m3.

    POWERS rounds the scale up to a power of two: add the largest mantissa, then clear the mantissa.
    """
    scale = tl.maximum(largest * (1.0 / 448.0), smallest)
    if POWERS:
        scale = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    return scale
