"""The fp8 base of a fused LoRA group: what lora_base.py asks of a kind, by the two products of fp8.py.

Activations are quantised once for all siblings of a group, forward and backward. x A^T and dy B are taken of the activations
themselves, in the compute dtype, as are all products of adapters: what is trained sees no fp8. That reads them twice, in two
launches: on an H200 one launch that did both took 99 to 181 us where the two take 85.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

import torch
from torch import Tensor

from fxtune.kernels.fp8 import Weight, quantize_rows, scaled_mm
from fxtune.kernels.frozen_base import Adapters, Base, Operand, added


class Fp8(Base):
    """`tensors`: the four of a fp8.Weight of the whole group."""

    def __init__(self, tensors: Sequence[Tensor], adapters: Adapters) -> None:
        super().__init__(tensors, adapters)
        self.weight = Weight(*tensors)

    def operand(self, x: Tensor, factor: Tensor) -> tuple[Operand, Tensor]:
        return Operand(x, quantize_rows(x)), self.projected(x, factor)

    def forward(self, operand: Operand, xa: Optional[Tensor], out: Optional[Tensor] = None) -> Tensor:
        return added(self.product(operand, self.weight.codes, self.weight.scales, out), xa, self.b.t())

    def backward(self, operand: Operand, dyb: Optional[Tensor], out: Optional[Tensor] = None) -> Tensor:
        return added(self.product(operand, self.weight.back, self.weight.back_scales, out), dyb, self.a)

    def product(self, operand: Operand, codes: Tensor, scales: Tensor, out: Optional[Tensor]) -> Tensor:
        if self.adapters.dtype is torch.bfloat16:
            return scaled_mm(operand.more, codes, scales, out)
        made = scaled_mm(operand.more, codes, scales).to(self.adapters.dtype)
        return made if out is None else out.copy_(made)
