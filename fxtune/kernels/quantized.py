"""Weights packed in 4 or 8 bits, dequantized for one use. techniques/quantized_modules.py (linears) and
techniques/experts/quantized.py hold such weights.

A weight that is never trained needs 16 bits only while it is being multiplied. It is dequantized into a buffer before
the matmul, forward and again backward, and nothing in 16 bits outlives the operator.

MXFP4 (OCP Microscaling Formats 1.0): 32 numbers in e2m1 (0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives) share a
scale, a power of two. A byte holds its exponent plus 127 (e8m0). A byte of codes holds two numbers, the first in its
low half, as in gpt-oss's experts. A number times its scale is exact in bfloat16 and float32.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

NF4_BLOCK, SCALE_BLOCK = 64, 256
MXFP4, MX_BLOCK = "mxfp4", 32
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The numbers with the codes 0 to 7. Code c + 8 is the negative of code c."""
CHUNK = 4096
"""Rows that unpack_mxfp4() in plain torch handles at a time."""


@torch.no_grad()
def unpack(kind: str, tensors: Sequence[Tensor], out: Tensor) -> None:
    """Dequantize a weight into a contiguous `out` [out, in]. With MXFP4 `out` may be [experts, out, in], with gaps
    between rows or matrices.

    `kind`: MXFP4, or a linear's `stored_as`; `tensors`: what pack_mxfp4() or quantized_modules.packed() returns
    for the weight; the codes may have any shape.
    """
    if kind == MXFP4:
        unpack_mxfp4(tensors[0], tensors[1], out)
    elif kind == "int8":
        torch.mul(tensors[0].view(out.shape), tensors[1].unsqueeze(1), out=out)
    else:
        assert kind == "nf4", kind
        functional, outer = bitsandbytes().functional, None
        codes, absmax, values, *nested = tensors
        codes = codes.view(-1, 1)
        if nested:
            outer = functional.QuantState(absmax=nested[1], code=nested[2], blocksize=SCALE_BLOCK, dtype=torch.float32)
        state = functional.QuantState(
            absmax=absmax,
            shape=out.shape,
            code=values,
            blocksize=NF4_BLOCK,
            quant_type="nf4",
            dtype=out.dtype,
            offset=nested[0] if nested else None,
            state2=outer,
        )
        if out.is_cuda:
            functional.dequantize_4bit(codes, state, out=out)
        else:  # on a CPU the library has no kernel that writes to a given tensor
            out.copy_(functional.dequantize_4bit(codes, state))


@torch.no_grad()
def pack_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """`weight` [..., in] as codes [..., in / 2] and exponents [..., in / 32], both uint8. `in` is a multiple of 32.

    The scale is the power of two that brings a block's largest absolute value into [4, 8). Numbers above 6 become 6.
    """
    blocks = weight.float().unflatten(-1, (-1, MX_BLOCK))
    largest = blocks.abs().amax(-1, keepdim=True)
    exponent = torch.where(largest > 0, torch.frexp(largest).exponent - 3, -127).clamp(-126, 127)
    scaled = torch.ldexp(blocks, -exponent)
    values = scaled.new_tensor(E2M1)
    codes = torch.bucketize(scaled.abs(), (values[1:] + values[:-1]) / 2, out_int32=True).to(torch.uint8)
    codes |= (scaled < 0).to(torch.uint8) << 3
    halves = codes.flatten(-2)
    return halves[..., ::2] | halves[..., 1::2] << 4, (exponent.squeeze(-1) + 127).to(torch.uint8)


@torch.no_grad()
def unpack_mxfp4(codes: Tensor, scales: Tensor, out: Tensor) -> None:
    """Dequantize the result of pack_mxfp4() into `out`, see unpack()."""
    if out.is_cuda:
        from fxtune.kernels import mxfp4_triton

        mxfp4_triton.unpack(codes, scales, out)
        return
    if out.dim() == 3:
        for matrix in zip(codes.view(len(out), -1), scales.view(len(out), -1), out, strict=True):
            unpack_mxfp4(*matrix)
        return
    values = torch.tensor([*E2M1, *(-value for value in E2M1)], device=out.device)
    codes, scales = codes.reshape(len(out), -1), scales.reshape(len(out), -1)
    for into, pairs, powers in zip(out.split(CHUNK), codes.split(CHUNK), scales.split(CHUNK), strict=True):
        numbers = values[torch.stack((pairs & 15, pairs >> 4), -1).flatten(1).int()].unflatten(1, (-1, MX_BLOCK))
        into.copy_(torch.ldexp(numbers, powers.int().unsqueeze(-1) - 127).flatten(1))


def int8_weight(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """codes [out, in] * scale [out], rounded once. With `out=` this is one kernel without a float32 copy."""
    return torch.mul(codes, scale.unsqueeze(1), out=torch.empty(codes.shape, dtype=dtype, device=codes.device))


# Cached, because each setLevel() clears the caches of all loggers, and a step calls this once for each weight.
@functools.cache
def bitsandbytes() -> Any:
    """Import bitsandbytes, without its warnings of missing kernels that fxtune does not use. This takes a second."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    import bitsandbytes

    return bitsandbytes
