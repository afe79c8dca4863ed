"""The Triton kernels of fp8.py: rows quantised, and a gated activation between the two products of an MLP with adapters.

A row's scale is known when its largest number is, so quantising wants a program to a row, which holds the row in registers where
it fits. The adapters' second halves (xa B^T) want tiles of rows and columns, for tensor cores. So an MLP's middle is two kernels:
one tile by tile, which adds the adapters' share to what the base's product gave and writes the activation in bfloat16 (the next
adapter's first half reads it, too), and one row by row, which quantises that. The alternative, adding the adapters' share into
the widest tensor of a layer by a matmul of its own, reads and writes that tensor once more: 57 KB a token of Llama-3-8B twice,
where the detour over bfloat16 costs 28 KB once.

All arithmetic is float32. Offsets are int64: 128k rows of 28,672 numbers are beyond int32. Imported only where there is a GPU:
triton is no part of torch's CPU builds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

HELD = 16384
"""Numbers of a row that a program keeps in registers; longer rows are read twice, the second time from the cache."""
TILE = (64, 128, 8)
"""Rows, columns and warps of a program of the gated activation."""
ACTIVATIONS = ("silu", "gelu_pytorch_tanh")


def quantize_rows(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, smallest: float, powers: bool) -> None:
    """`x`: [rows, width], each row contiguous; `codes`: e4m3 of that shape, written; `scales`: float32 [rows], written."""
    rows, width = x.shape
    assert x.stride(1) == codes.stride(1) == 1
    assert scales.is_contiguous()
    block = min(triton.next_power_of_2(width), HELD)
    if rows:
        _quantize_rows[(rows,)](x, x.stride(0), codes, codes.stride(0), scales, width, smallest, POWERS=powers, BLOCK=block,
                                ONCE=block >= width, num_warps=16 if block > 8192 else 8 if block > 1024 else 4)


def gated(gate_up: torch.Tensor, xa: torch.Tensor, b: torch.Tensor, out: torch.Tensor, act: str) -> None:
    """out = act(gate + xa b_gate^T) * (up + xa b_up^T).

    `gate_up`: [rows, 2i], the base's product; `xa`: [rows, R]; `b`: [2i, R], scaled, gate's rows before up's; `out`: [rows, i],
    written. R a power of two, 16 or more; of all of them each row contiguous; `act` is one of ACTIVATIONS.
    """
    rows, inner = out.shape
    _checked(gate_up, xa, b, out)
    if rows:
        _gated[(triton.cdiv(inner, TILE[1]), triton.cdiv(rows, TILE[0]))](
            gate_up, gate_up.stride(0), xa, xa.stride(0), b, b.stride(0), out, out.stride(0), rows, inner,
            ACT=ACTIVATIONS.index(act), RANK=xa.shape[1], ROWS=TILE[0], COLUMNS=TILE[1], num_warps=TILE[2])


def gated_backward(gate_up: torch.Tensor, xa: torch.Tensor, b: torch.Tensor, d_out: torch.Tensor, ya: torch.Tensor,
                   a: torch.Tensor, d_gate_up: torch.Tensor, act: str) -> None:
    """Gradients of gate and up, [rows, 2i], into `d_gate_up`; then `d_out` is overwritten by what gated() gave.

    The gradient of its result is `d_out + ya a`, `d_out` [rows, i] from the next linear's base and the rest from its adapter:
    `ya` [rows, Q] (the gradient above times its scaled B) and `a` [Q, i]. The rest as for gated(); Q like R.
    """
    rows, inner = d_out.shape
    _checked(gate_up, xa, b, d_out)
    assert (d_gate_up.shape, ya.shape) == (gate_up.shape, (rows, len(a)))
    assert a.shape[1] == inner
    assert d_gate_up.stride(1) == ya.stride(1) == a.stride(1) == 1
    if rows:
        _gated_backward[(triton.cdiv(inner, TILE[1]), triton.cdiv(rows, TILE[0]))](
            gate_up, gate_up.stride(0), xa, xa.stride(0), b, b.stride(0), d_out, d_out.stride(0), ya, ya.stride(0),
            a, a.stride(0), d_gate_up, d_gate_up.stride(0), rows, inner, ACT=ACTIVATIONS.index(act), RANK=xa.shape[1],
            NEXT=ya.shape[1], ROWS=TILE[0], COLUMNS=TILE[1], num_warps=TILE[2])


def _checked(gate_up: torch.Tensor, xa: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    rows, inner = out.shape
    assert (gate_up.shape, xa.shape, len(b)) == ((rows, 2 * inner), (rows, b.shape[1]), 2 * inner)
    assert gate_up.stride(1) == xa.stride(1) == b.stride(1) == out.stride(1) == 1


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
def _scale(largest, smallest, POWERS: tl.constexpr):
    """448 is e4m3's largest number. The next power of two: add all but one of the mantissa's steps, then drop the mantissa."""
    scale = tl.maximum(largest * (1.0 / 448.0), smallest)
    if POWERS:
        scale = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def _bend(gate, ACT: tl.constexpr):
    """(act(gate), act'(gate)). tanh by way of the sigmoid: it is in triton itself everywhere."""
    if ACT == 0:
        s = tl.sigmoid(gate)
        return gate * s, s * (1.0 + gate * (1.0 - s))
    inside = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
    s = tl.sigmoid(2.0 * inside)  # (1 + tanh) / 2
    return gate * s, s + gate * 2.0 * s * (1.0 - s) * 0.7978845608028654 * (1.0 + 0.134145 * gate * gate)


@triton.jit
def _gate_and_up(gate_up_ptr, gate_up_stride, xa_ptr, xa_stride, b_ptr, b_stride, row, column, inside, rows, inner,
                 RANK: tl.constexpr):
    """A tile of gate and of up with the adapters' share, in float32; `row` and `column` as int64 [ROWS, 1] and [1, COLUMNS]."""
    rank = tl.arange(0, RANK)[None, :]
    xa = tl.load(xa_ptr + row * xa_stride + rank, mask=row < rows, other=0.0)
    rank = tl.arange(0, RANK)[:, None]
    at = b_ptr + column * b_stride + rank
    b_gate = tl.load(at, mask=column < inner, other=0.0)
    b_up = tl.load(at + b_stride * inner, mask=column < inner, other=0.0)
    at = gate_up_ptr + row * gate_up_stride + column
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32) + tl.dot(xa, b_gate)
    up = tl.load(at + inner, mask=inside, other=0.0).to(tl.float32) + tl.dot(xa, b_up)
    return gate, up


@triton.jit
def _gated(gate_up_ptr, gate_up_stride, xa_ptr, xa_stride, b_ptr, b_stride, out_ptr, out_stride, rows, inner,
           ACT: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = (tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = (row < rows) & (column < inner)
    gate, up = _gate_and_up(gate_up_ptr, gate_up_stride, xa_ptr, xa_stride, b_ptr, b_stride, row, column, inside, rows, inner,
                            RANK)
    bent, _ = _bend(gate, ACT)
    tl.store(out_ptr + row * out_stride + column, (bent * up).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _gated_backward(gate_up_ptr, gate_up_stride, xa_ptr, xa_stride, b_ptr, b_stride, d_out_ptr, d_out_stride, ya_ptr, ya_stride,
                    a_ptr, a_stride, d_gate_up_ptr, d_gate_up_stride, rows, inner, ACT: tl.constexpr, RANK: tl.constexpr,
                    NEXT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = (tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = (row < rows) & (column < inner)
    rank = tl.arange(0, NEXT)
    ya = tl.load(ya_ptr + row * ya_stride + rank[None, :], mask=row < rows, other=0.0)
    a = tl.load(a_ptr + rank[:, None] * a_stride + column, mask=column < inner, other=0.0)
    d_out = tl.load(d_out_ptr + row * d_out_stride + column, mask=inside, other=0.0).to(tl.float32) + tl.dot(ya, a)
    gate, up = _gate_and_up(gate_up_ptr, gate_up_stride, xa_ptr, xa_stride, b_ptr, b_stride, row, column, inside, rows, inner,
                            RANK)
    bent, slope = _bend(gate, ACT)
    at = d_gate_up_ptr + row * d_gate_up_stride + column
    tl.store(at, (d_out * up * slope).to(d_gate_up_ptr.dtype.element_ty), mask=inside)
    tl.store(at + inner, (d_out * bent).to(d_gate_up_ptr.dtype.element_ty), mask=inside)
    tl.debug_barrier()  # every thread has read its d_out before one writes over it
    tl.store(d_out_ptr + row * d_out_stride + column, (bent * up).to(d_out_ptr.dtype.element_ty), mask=inside)
