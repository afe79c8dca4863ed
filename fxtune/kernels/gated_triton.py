"""The Triton kernels of gated.py. A program treats 2,048 columns of a row: each thread loads 16 bytes of gate and of up.

Reads and writes nothing twice, so an H200 runs them at its memory's speed: forward 6 bytes an element of p in 16 bits, backward
12. Columns are counted before rows, so that programs which run at the same time lie side by side in memory. Offsets are int64:
65,536 rows of gate and up of an 8B model are 1.9e9 numbers. Imported only where there is a GPU: triton is no part of torch's
CPU builds.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fxtune.kernels.activation import activation

BLOCK = 2048
"""Columns of a program."""


def forward(act: str, gate_up: Tensor, out: Tensor) -> None:
    """`gate_up` [rows, 2 width], `out` [rows, width], both with contiguous rows at any distance."""
    rows, width = out.shape
    assert gate_up.shape == (rows, 2 * width)
    assert gate_up.stride(1) == out.stride(1) == 1 or width <= 1
    if rows and width:
        block, warps = _size(width)
        _forward[(rows * triton.cdiv(width, block),)](gate_up, gate_up.stride(0), out, out.stride(0), width,
                                                      SILU=act == "silu", BLOCK=block, num_warps=warps)


def backward(act: str, gate_up: Tensor, dp: Tensor, out: Tensor) -> None:
    """`gate_up` and `out` (dgate, dup) [rows, 2 width]; `dp` [rows, width], which becomes p. Contiguous rows at any distance."""
    rows, width = dp.shape
    assert gate_up.shape == out.shape == (rows, 2 * width)
    assert gate_up.stride(1) == dp.stride(1) == out.stride(1) == 1 or width <= 1
    if rows and width:
        block, warps = _size(width)
        _backward[(rows * triton.cdiv(width, block),)](gate_up, gate_up.stride(0), dp, dp.stride(0), out, out.stride(0), width,
                                                       SILU=act == "silu", BLOCK=block, num_warps=warps)


def _size(width: int) -> tuple[int, int]:
    """Columns and warps of a program: eight numbers a thread."""
    block = min(BLOCK, triton.next_power_of_2(width))
    return block, max(block // 256, 1)


@triton.jit
def _place(width, BLOCK: tl.constexpr):
    """Which row and which columns are this program's."""
    blocks = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    return row, columns, columns < width


@triton.jit
def _forward(gate_up_ptr, gate_up_stride, out_ptr, out_stride, width, SILU: tl.constexpr, BLOCK: tl.constexpr):
    row, columns, inside = _place(width, BLOCK)
    gate_up_ptr += row * gate_up_stride
    gate = tl.load(gate_up_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + width + columns, mask=inside, other=0.0).to(tl.float32)
    value, _ = activation(gate, SILU)
    tl.store(out_ptr + row * out_stride + columns, (value * up).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward(gate_up_ptr, gate_up_stride, dp_ptr, dp_stride, out_ptr, out_stride, width, SILU: tl.constexpr,
              BLOCK: tl.constexpr):
    row, columns, inside = _place(width, BLOCK)
    gate_up_ptr += row * gate_up_stride
    dp_ptr += row * dp_stride
    out_ptr += row * out_stride
    gate = tl.load(gate_up_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + width + columns, mask=inside, other=0.0).to(tl.float32)
    above = tl.load(dp_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    value, slope = activation(gate, SILU)
    kind = out_ptr.dtype.element_ty
    tl.store(out_ptr + columns, (above * up * slope).to(kind), mask=inside)
    tl.store(out_ptr + width + columns, (above * value).to(kind), mask=inside)
    tl.store(dp_ptr + columns, (value * up).to(dp_ptr.dtype.element_ty), mask=inside)
