"""The Triton kernels of fp8.py: each row's scale and its codes, in one launch and one pass over memory.

    quantize_rows             a program takes one row
    dequantize_rows           and back: a head's, each step
    project_and_quantize      a program takes a few rows, and multiplies them by an adapter's first half in passing (lora_fp8.py)

The scale is known when the row's largest number is, so a row stays in registers in between where it fits, and is read again
from the cache where it does not. All arithmetic is float32. Offsets are int64: 128k rows of 28,672 numbers are beyond int32.
Imported only where there is a GPU: triton is no part of torch's CPU builds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

HELD = 8192
"""Numbers of a row that a program of quantize_rows keeps in registers. On an H200 with 16 warps a row of 28,672 is read twice at
4.1 TB/s; with 16,384 numbers held it is 3.5."""
BOTH = dict(ROWS=16, STEP=64, PARTS=8, WRITE=512, num_warps=8, num_stages=3)
"""project_and_quantize: rows of a program; the sum over a row is cut into PARTS, each of which takes STEP numbers at a time (a
warp's, where there are as many parts as warps); numbers of a row that are quantised at once."""


def quantize_rows(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, smallest: float, powers: bool) -> None:
    """`x`: [rows, width], each row contiguous; `codes`: e4m3 of that shape, written; `scales`: float32 [rows], written."""
    rows, width = x.shape
    assert x.stride(1) == codes.stride(1) == 1
    assert scales.is_contiguous()
    block = min(triton.next_power_of_2(width), HELD)
    if rows:
        _quantize_rows[(rows,)](x, x.stride(0), codes, codes.stride(0), scales, width, smallest, POWERS=powers, BLOCK=block,
                                ONCE=block >= width, num_warps=16 if width > HELD else 8 if block > 1024 else 4)


def dequantize_rows(codes: torch.Tensor, scales: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    """`codes` e4m3 [rows, width] times `scales`, float32, one for each row; written to `into` and returned. All contiguous."""
    rows, width = codes.shape
    assert all(one.is_contiguous() for one in (codes, scales, into))
    if rows:
        block = min(triton.next_power_of_2(width), 4096)
        _dequantize_rows[(rows, triton.cdiv(width, block))](codes, scales, into, width, BLOCK=block, num_warps=4)
    return into


def project_and_quantize(x: torch.Tensor, factor: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, smallest: float,
                         ones: int = -1, value: float = 1.0) -> torch.Tensor:
    """What quantize_rows() does, and x F [rows, R] in x's dtype, which is returned.

    `x`: 16 bits, [rows, width]; `factor`: [width, R] of any strides, R a multiple of 16; `ones`: a column of the product that
    is `value` instead. Programs of all processors together must not hold more rows than fit into the cache.
    """
    (rows, width), columns = x.shape, factor.shape[1]
    assert (x.stride(1), codes.stride(1), x.dtype.itemsize) == (1, 1, 2), (x.stride(), x.dtype)
    assert scales.is_contiguous()
    product = x.new_empty(rows, columns)
    if rows:
        _project_and_quantize[(triton.cdiv(rows, BOTH["ROWS"]),)](
            x, x.stride(0), factor, *factor.stride(), product, codes, codes.stride(0), scales, rows, width, columns, ones,
            float(value), smallest, WIDTH=max(triton.next_power_of_2(columns), 16), **BOTH)
    return product


@triton.jit
def _quantize_rows(x_ptr, x_stride, codes_ptr, codes_stride, scales_ptr, width, smallest, POWERS: tl.constexpr,
                   BLOCK: tl.constexpr, ONCE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    codes_ptr += row * codes_stride
    columns = tl.arange(0, BLOCK)
    if ONCE:
        x = tl.load(x_ptr + columns, mask=columns < width, other=0.0).to(tl.float32)
        scale = _scale(tl.max(tl.abs(x), 0), smallest, POWERS)
        tl.store(codes_ptr + columns, (x * (1.0 / scale)).to(codes_ptr.dtype.element_ty), mask=columns < width)
    else:
        largest = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, width, BLOCK):
            at = start + columns
            x = tl.load(x_ptr + at, mask=at < width, other=0.0, eviction_policy="evict_last").to(tl.float32)
            largest = tl.maximum(largest, tl.abs(x))
        scale = _scale(tl.max(largest, 0), smallest, POWERS)
        factor = 1.0 / scale
        for start in range(0, width, BLOCK):
            at = start + columns
            x = tl.load(x_ptr + at, mask=at < width, other=0.0, eviction_policy="evict_first").to(tl.float32)
            tl.store(codes_ptr + at, (x * factor).to(codes_ptr.dtype.element_ty), mask=at < width)
    tl.store(scales_ptr + row, scale)


@triton.jit
def _dequantize_rows(codes_ptr, scales_ptr, into_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    codes = tl.load(codes_ptr + row * width + columns, mask=columns < width, other=0.0).to(tl.float32)
    tl.store(into_ptr + row * width + columns, (codes * tl.load(scales_ptr + row)).to(into_ptr.dtype.element_ty),
             mask=columns < width)


@triton.jit
def _project_and_quantize(x_ptr, x_stride, factor_ptr, factor_down, factor_across, product_ptr, codes_ptr, codes_stride,
                          scales_ptr, rows, width, columns, ones, value, smallest, WIDTH: tl.constexpr, ROWS: tl.constexpr,
                          STEP: tl.constexpr, PARTS: tl.constexpr, WRITE: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * ROWS
    # Few rows are too few for the warps of a program to share a product between them, so each takes a part of the sum.
    part = tl.arange(0, PARTS)[:, None, None] * STEP
    row = first + tl.arange(0, ROWS)[None, :, None]
    column = tl.arange(0, WIDTH)[None, None, :]
    total = tl.zeros((PARTS, ROWS, WIDTH), tl.float32)
    largest = tl.zeros((PARTS, ROWS, STEP), tl.float32)
    for start in range(0, width, PARTS * STEP):
        across = start + part + tl.arange(0, STEP)[None, None, :]
        down = start + part + tl.arange(0, STEP)[None, :, None]
        x = tl.load(x_ptr + row * x_stride + across, mask=(row < rows) & (across < width), other=0.0,
                    eviction_policy="evict_last")
        factor = tl.load(factor_ptr + down.to(tl.int64) * factor_down + column * factor_across,
                         mask=(down < width) & (column < columns), other=0.0, eviction_policy="evict_last")
        total = tl.dot(x, factor, total)
        largest = tl.maximum(largest, tl.abs(x.to(tl.float32)))
    row, column = first + tl.arange(0, ROWS), tl.arange(0, WIDTH)[None, :]
    product = tl.where(column == ones, value, tl.sum(total, 0))
    tl.store(product_ptr + row[:, None] * columns + column, product.to(product_ptr.dtype.element_ty),
             mask=(row[:, None] < rows) & (column < columns))
    scale = _scale(tl.max(tl.max(largest, 2), 0), smallest, False)
    tl.store(scales_ptr + row, scale, mask=row < rows)
    factor = (1.0 / scale)[:, None]
    row = row[:, None]
    for start in range(0, width, WRITE):
        across = start + tl.arange(0, WRITE)[None, :]
        inside = (row < rows) & (across < width)
        x = tl.load(x_ptr + row * x_stride + across, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        tl.store(codes_ptr + row * codes_stride + across, (x * factor).to(codes_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _scale(largest, smallest, POWERS: tl.constexpr):
    """448 is e4m3's largest number. The next power of two: add all but one of the mantissa's steps, then drop the mantissa."""
    scale = tl.maximum(largest * (1.0 / 448.0), smallest)
    if POWERS:
        scale = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    return scale
