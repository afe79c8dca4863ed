"""act(gate) * up and its gradient, in one pass each over what a gated MLP (SwiGLU, GeGLU: arXiv 2002.05202) holds in between.

`gate_up` [rows, 2 width] is gate and up side by side, as one matmul leaves them. Both functions write to where the caller
wants the result, whose rows may lie apart, such as the left part of a buffer that the next matmul reads. All arithmetic is
float32 and each result is rounded once. On a GPU the kernels of gated_triton.py do it; elsewhere torch, in the same order.
"""

from __future__ import annotations

import torch
from torch import Tensor

ACTS = ("silu", "gelu_pytorch_tanh")
"""What `act` may be, by transformers' names."""
ROOT_2_OVER_PI, CUBIC = 0.7978845608028654, 0.044715


def gated(act: str, gate_up: Tensor, out: Tensor) -> Tensor:
    """Write p = act(gate) * up to `out` [rows, width] and return it."""
    if gate_up.is_cuda:
        from fxtune.kernels.gated_triton import forward

        forward(act, gate_up, out)
        return out
    gate, up = gate_up.float().chunk(2, -1)
    return out.copy_(_act(act, gate)[0] * up)


def gated_backward(act: str, gate_up: Tensor, dp: Tensor, out: Tensor) -> Tensor:
    """Write [dgate | dup] to `out` [rows, 2 width] and return it; `dp` [rows, width] is p's gradient, and p afterwards."""
    if gate_up.is_cuda:
        from fxtune.kernels.gated_triton import backward

        backward(act, gate_up, dp, out)
        return out
    gate, up = gate_up.float().chunk(2, -1)
    activated, slope = _act(act, gate)
    above = dp.float()
    out.copy_(torch.cat([above * up * slope, above * activated], -1))
    dp.copy_(activated * up)
    return out


def _act(act: str, gate: Tensor) -> tuple[Tensor, Tensor]:
    """act(gate) and its derivative."""
    if act == "silu":
        sigmoid = gate.sigmoid()
        return gate * sigmoid, sigmoid * (1 + gate * (1 - sigmoid))
    assert act == "gelu_pytorch_tanh", act
    squared = gate * gate
    bent = (ROOT_2_OVER_PI * gate * (1 + CUBIC * squared)).tanh()
    slope = 0.5 * (1 + bent) + 0.5 * gate * (1 - bent * bent) * ROOT_2_OVER_PI * (1 + 3 * CUBIC * squared)
    return 0.5 * gate * (1 + bent), slope
