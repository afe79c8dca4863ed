"""The activation of a gated MLP inside Triton kernels. Import this module only on a GPU."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def activation(gate, SILU: tl.constexpr):
    """act(gate) and its derivative, in float32. gelu is computed from the sigmoid: not every Triton has tanh."""
    if SILU:
        s = tl.sigmoid(gate)
        slope = s * (1.0 + gate * (1.0 - s))
    else:
        s = tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))  # (1 + tanh) / 2
        slope = s + gate * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * gate * gate)
    return gate * s, slope
