"""Parts that several Triton kernels share: a matrix as an argument, which is a tuple of its pointer and the distance
between its rows, and the activation of a gated MLP. Import this module only on a GPU, like every module that imports
triton, because torch's CPU builds come without triton.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def matrix(x: Tensor) -> tuple[Tensor, int]:
    """`x` [rows, columns] with contiguous rows, which may have gaps between them."""
    assert x.stride(1) == 1, x.stride()
    return x, x.stride(0)


def rank_block(ranks: int) -> int:
    """The columns of a tile that holds `ranks` columns: a power of two, and at least 16 for tensor cores."""
    return max(triton.next_power_of_2(ranks), 16)


@triton.jit
def load(matrix, row, column, mask):
    """A tile of the matrix, with zeros where `mask` is false."""
    return tl.load(matrix[0] + row * matrix[1] + column, mask=mask, other=0.0)


@triton.jit
def store(matrix, row, column, value, mask):
    """Write a tile of the matrix, rounded to its dtype."""
    tl.store(matrix[0] + row * matrix[1] + column, value.to(matrix[0].dtype.element_ty), mask=mask)


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
