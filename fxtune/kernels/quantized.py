"""Weights packed in 4 or 8 bits, dequantized for one use. The linears that hold them: techniques/quantized_modules.py.

A weight that is never trained needs 16 bits only while it is being multiplied. It is dequantized into a buffer before
the matmul, forward and again backward, and nothing in 16 bits outlives the operator.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

NF4_BLOCK, SCALE_BLOCK = 64, 256


@torch.no_grad()
def unpack(kind: str, tensors: Sequence[Tensor], out: Tensor) -> None:
    """Dequantize a linear's weight into `out` [out, in], which is contiguous.

    `kind`: the linear's `fxtune_quantized`; `tensors`: what quantized_modules.packed() returns for it.
    """
    if kind.startswith("int8/"):
        torch.mul(tensors[0], tensors[1].unsqueeze(1), out=out)
    elif kind == "nf4/torchao":
        codes, scales, factor, mean, values = tensors
        nf4_class = torchao().NF4Tensor
        tensor_args = sys.modules[nf4_class.__module__].SubclassTensorArgs
        stored = nf4_class(
            tensor_args(out.shape, out.stride(), 0, values.dtype, out.device, False),
            NF4_BLOCK,
            out.numel() // NF4_BLOCK,
            SCALE_BLOCK,
            scales,
            factor,
            mean,
            codes,
            values,
        )
        out.copy_(stored.get_original_weight())
    else:
        assert kind == "nf4/bitsandbytes", kind
        functional, outer = bitsandbytes().functional, None
        codes, absmax, values, *nested = tensors
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
        else:  # the library has no kernel here that writes to a given tensor
            out.copy_(functional.dequantize_4bit(codes, state))


def int8_weight(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """codes [out, in] * scale [out], rounded once. `out=` makes it one kernel without an intermediate float32 copy."""
    return torch.mul(codes, scale.unsqueeze(1), out=torch.empty(codes.shape, dtype=dtype, device=codes.device))


def bitsandbytes() -> Any:
    """The package bitsandbytes. It takes a second to import, and logs missing kernels that fxtune does not use."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    import bitsandbytes

    return bitsandbytes


def torchao() -> Any:
    """torchao.quantization. The package logs every extension that was built for another torch."""
    logging.getLogger("torchao").setLevel(logging.ERROR)
    import torchao.quantization

    return torchao.quantization
