"""Triton kernel of quantized.py: unpacks MXFP4 to numbers in 16 or 32 bits, in one pass over memory.

Import this module only on a GPU.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

BYTES = 1024
"""Bytes of codes that a program reads."""
DOUBLED = tl.constexpr(0xC8643210 - 2**32)
"""A table in one signed integer: twice the numbers 0, 0.5, 1, 1.5, 2, 3, 4 and 6, in four bits each."""
SIGN = tl.constexpr(-(2**31))


def unpack(codes: Tensor, scales: Tensor, out: Tensor) -> None:
    """Write the numbers of `codes` (uint8 with two numbers each) to `out`. `scales`: uint8, one for each 16 bytes of
    codes. All tensors are contiguous, but rows or matrices of `out` may have gaps between them."""
    assert codes.is_contiguous()
    assert scales.is_contiguous()
    assert out.numel() == 2 * codes.numel() == 32 * scales.numel()
    length = step = out.numel()
    if not out.is_contiguous():
        dim = -2 if out.stride(-2) != out.shape[-1] else -3
        length, step = math.prod(out.shape[dim + 1 :]), out.stride(dim)
        assert out[0].is_contiguous() or out.stride(0) == len(out[0]) * step
    if out.numel():
        blocks = triton.cdiv(length // 2, BYTES)
        grid = (blocks * (out.numel() // length),)
        _unpack[grid](codes, scales, out, blocks, length // 2, step, BYTES=BYTES, num_warps=4)


@triton.jit
def _unpack(codes_ptr, scales_ptr, into_ptr, blocks, length, step, BYTES: tl.constexpr):
    """A program unpacks a block of one part. A part has no gaps, and `length` bytes of codes."""
    part, start = (tl.program_id(0) // blocks).to(tl.int64), (tl.program_id(0) % blocks).to(tl.int64) * BYTES
    byte = start + tl.arange(0, BYTES)
    at = part * length + byte
    codes = tl.load(codes_ptr + at, mask=byte < length, other=0).to(tl.int32)
    power = tl.load(scales_ptr + at // 16, mask=byte < length, other=127).to(tl.int32)
    # The bits of the exponent of 2^(power - 127) are `power`, except for the smallest power, which is subnormal.
    scale = tl.where(power == 0, 0x400000, power << 23).to(tl.float32, bitcast=True)
    low, high = _magnitude(codes << 2), _magnitude(codes >> 2)
    numbers = tl.interleave(_signed(low, codes << 28) * scale, _signed(high, codes << 24) * scale)
    into = 2 * start + tl.arange(0, 2 * BYTES)
    tl.store(into_ptr + part * step + into, numbers.to(into_ptr.dtype.element_ty), mask=into < 2 * length)


@triton.jit
def _magnitude(places):
    """The absolute value of a number of e2m1. Bits 2 to 4 of `places` are its code without the sign.

    The integer DOUBLED is a table of the doubled values, four bits each. A doubled value becomes the lowest bits of
    the float32 number 2^23, so no instruction converts it. The kernel's instructions take as long as its reads and
    writes: 280 instructions for 16 numbers. With comparisons and a conversion there would be 368.
    """
    doubled = (DOUBLED >> (places & 28)) & 15
    return (doubled | 0x4B000000).to(tl.float32, bitcast=True) * 0.5 - 4194304.0


@triton.jit
def _signed(size, sign):
    """`size` with the highest bit of the integer `sign` as its sign."""
    return (size.to(tl.int32, bitcast=True) | (sign & SIGN)).to(tl.float32, bitcast=True)
