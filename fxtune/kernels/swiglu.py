"""act(gate) * up and its gradient, each in one pass over the inner tensors of a gated MLP (SwiGLU, GeGLU: arXiv
2002.05202).

`gate_up` [rows, 2 width] is gate and up side by side, the result of one matmul. gated() and gated_backward() write to
a tensor that the caller passes. Its rows may have gaps between them. All arithmetic is float32, and each result is
rounded once. On a GPU Triton kernels compute this (swiglu_lora_triton.py); elsewhere torch does, in the same order.

The functions also add the products of adapters, each passed as its two factors. gated() adds a product to gate and up,
and gated_backward() adds another one to the gradient of p = act(gate) * up. A separate matmul would read and write the
widest tensors of a layer once more. gated_backward() can also sum its results over the rows, for the gradients of
adapters (`FusedSums`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

ACTS = ("silu", "gelu_pytorch_tanh")
"""Values of `act`, by transformers' names."""


class Activation(NamedTuple):
    """h = f(gate) * (up + shift). Before that, gate is clamped to at most `limit`, and up to [-limit, limit].

    Most models have silu or gelu without a limit; gpt-oss has alpha 1.702, limit 7, shift 1, interleaved.
    """

    name: str = "silu"
    """One of ACTS."""
    alpha: float = 1.0
    """f(gate) = act(alpha gate) / alpha. With silu this is gate * sigmoid(alpha gate)."""
    limit: float = 0.0
    """0: no limit."""
    shift: float = 0.0
    interleaved: bool = False
    """Columns of gate and up take turns in g; otherwise all columns of gate come first."""


SILU = Activation()
Share = tuple[Tensor, Tensor]
"""The two factors of an adapter's product that is still to be added."""
ROOT_2_OVER_PI, CUBIC = 0.7978845608028654, 0.044715
MIN_ROWS, MAX_RANK = 4096, 32
"""On a GPU FusedSums takes at least MIN_ROWS rows, and ranks up to MAX_RANK: sums of a larger rank do not fit into
registers.
"""


@dataclass
class FusedSums:
    """Sums over rows that gated_backward() computes from its results: g^T xa and p^T dyb, with g = [dgate | dup]."""

    xa: Tensor
    """x A^T [rows, R]: the columns for dgate, followed by the columns for dup."""
    dyb: Tensor
    """dy B of down [rows, Q]."""
    ranks: tuple[int, int, int]
    """The number of columns of xa for dgate, of xa for dup, and of dyb. Other columns of the sums have no meaning."""
    keep_p: bool
    """Whether dp must be overwritten with p; otherwise it may keep its values."""
    totals: tuple[Tensor | None, Tensor | None] = (None, None)
    """The two sums as partial sums, [parts, 2 width, R] and [parts, width, Q], float32 or float64. Before the call
    both are None, or both are the result of an earlier call. The call then adds its sums to that result.
    """


def can_fuse_sums(x: Tensor, ranks: tuple[int, int, int]) -> bool:
    """Whether gated_backward() can compute FusedSums for activations like `x` [rows, any]."""
    return not x.is_cuda or (x.dtype.itemsize == 2 and len(x) >= MIN_ROWS and max(ranks) <= MAX_RANK)


def gated(act: str, gate_up: Tensor, share: Share, out: Tensor) -> Tensor:
    """Write p = act(gate) * up to `out` [rows, width] and return it.

    `share`: xa [rows, R] and b [2 width, R]; xa b^T is added to `gate_up` before the activation.
    """
    if gate_up.is_cuda and gate_up.dtype is not torch.float64:
        from fxtune.kernels.swiglu_lora_triton import forward

        forward(act, gate_up, out, share)
        return out
    gate, up = wide(gate_up).addmm(wide(share[0]), wide(share[1]).t()).chunk(2, -1)
    return out.copy_(act_and_slope(act, gate)[0] * up)


def gated_backward(
    act: str, gate_up: Tensor, dp: Tensor, share: Share, above: Share, out: Tensor, sums: FusedSums | None = None
) -> Tensor:
    """Write [dgate | dup] to `out` [rows, 2 width] and return it. `dp` [rows, width], p's gradient, is overwritten
    with p (with `sums`, if they keep p).

    `share`: see gated(). `above`: ya [rows, Q] and a [Q, width]; ya a is added to `dp` before the gradients are
    computed. `sums`: also compute these sums. They use the xa of `share`, and ya as dyb.
    """
    if gate_up.is_cuda and gate_up.dtype is not torch.float64:
        if sums is not None:
            from fxtune.kernels import swiglu_reduce_triton

            factors = (share[1], above[1])
            sums.totals = swiglu_reduce_triton.backward(
                act, gate_up, dp, out, sums.xa, sums.dyb, sums.ranks, sums.totals, factors, sums.keep_p
            )
            return out
        from fxtune.kernels.swiglu_lora_triton import backward

        backward(act, gate_up, dp, out, share, above)
        return out
    gate, up = wide(gate_up).addmm(wide(share[0]), wide(share[1]).t()).chunk(2, -1)
    activated, slope = act_and_slope(act, gate)
    gradient = wide(dp).addmm(wide(above[0]), wide(above[1]))
    out.copy_(torch.cat([gradient * up * slope, gradient * activated], -1))
    dp.copy_(activated * up)
    if sums is not None:
        sum_b, sum_a = (
            (wide(inner).t() @ wide(narrow)).unsqueeze(0) for inner, narrow in ((out, sums.xa), (dp, sums.dyb))
        )
        b, a = sums.totals
        sums.totals = sum_b if b is None else b.add_(sum_b), sum_a if a is None else a.add_(sum_a)
    return out


def wide(x: Tensor) -> Tensor:
    """`x` in float32. float64 stays."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def act_and_slope(act: str, gate: Tensor) -> tuple[Tensor, Tensor]:
    """act(gate) and its derivative."""
    if act == "silu":
        sigmoid = gate.sigmoid()
        return gate * sigmoid, sigmoid * (1 + gate * (1 - sigmoid))
    assert act == "gelu_pytorch_tanh", act
    squared = gate * gate
    tanh = (ROOT_2_OVER_PI * gate * (1 + CUBIC * squared)).tanh()
    slope = 0.5 * (1 + tanh) + 0.5 * gate * (1 - tanh * tanh) * ROOT_2_OVER_PI * (1 + 3 * CUBIC * squared)
    return 0.5 * gate * (1 + tanh), slope
