"""act(gate) * up and its gradient, in one pass each over what a gated MLP (SwiGLU, GeGLU: arXiv 2002.05202) holds in between.

`gate_up` [rows, 2 width] is gate and up side by side, as one matmul leaves them. Both functions write to where the caller
wants the result, whose rows may lie apart, such as the left part of a buffer that the next matmul reads. All arithmetic is
float32 and each result is rounded once. On a GPU Triton kernels do it (gated_lora_triton.py); elsewhere torch, in the same order.

What adapters add to gate and up, and backward to p's gradient, comes as the two factors of it and is added in passing, where a
matmul would read and write these widest tensors of a layer once more. And sums over the rows of what the backward pass makes,
which are gradients of adapters, can be taken in passing, too: `Passing` (gated_sums_triton.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

import torch
from torch import Tensor

ACTS = ("silu", "gelu_pytorch_tanh")
"""What `act` may be, by transformers' names."""
Share = tuple[Tensor, Tensor]
"""Two factors of a product that is still to be added."""
ROOT_2_OVER_PI, CUBIC = 0.7978845608028654, 0.044715
FEWEST, WIDEST = 4096, 32
"""On a GPU sums are taken in passing from so many rows, and up to this rank: beyond, they do not fit into registers."""


@dataclass
class Passing:
    """Sums over rows for gated_backward() to take of what it makes: with g = [dgate | dup], g^T xa and p^T dyb."""

    xa: Tensor
    """[rows, R]: first the columns for dgate, then those for dup."""
    dyb: Tensor
    """[rows, Q]."""
    ranks: tuple[int, int, int]
    """How many columns of xa are for dgate and for dup, and how many of dyb count: what lies beyond in the sums means nothing."""
    keep_p: bool
    """Whether p is wanted, too: else dp stays as it is, or not."""
    totals: tuple[Optional[Tensor], Optional[Tensor]] = field(default=(None, None))
    """The sums in parts to be added up, [parts, 2 width, R] and [parts, width, Q], float32 or float64; both are None, or what an
    earlier call left here, to which those of these rows are added."""


def sums_in_passing(x: Tensor, ranks: tuple[int, int, int]) -> bool:
    """Whether gated_backward() takes a `Passing` for activations [rows, any] such as `x`."""
    return not x.is_cuda or (x.dtype.itemsize == 2 and len(x) >= FEWEST and max(ranks) <= WIDEST)


def gated(act: str, gate_up: Tensor, share: Share, out: Tensor) -> Tensor:
    """Write p = act(gate) * up to `out` [rows, width] and return it.

    `share`: what is to be added to `gate_up` before that, as two factors, xa [rows, R] and b [2 width, R]: xa b^T.
    """
    if gate_up.is_cuda and gate_up.dtype is not torch.float64:
        from fxtune.kernels.swiglu_lora_triton import forward

        forward(act, gate_up, out, share)
        return out
    gate, up = _wide(gate_up).addmm(_wide(share[0]), _wide(share[1]).t()).chunk(2, -1)
    return out.copy_(_act(act, gate)[0] * up)


def gated_backward(
    act: str, gate_up: Tensor, dp: Tensor, share: Share, above: Share, out: Tensor, passing: Optional[Passing] = None
) -> Tensor:
    """Write [dgate | dup] to `out` [rows, 2 width] and return it; `dp` [rows, width] is p's gradient, and p afterwards.

    `share` as for gated(); `above`: what is to be added to `dp`, as the factors ya [rows, Q] and a [Q, width]: ya a.
    `passing`: take these sums, too, and leave them there; its xa and dyb are those of share and above.
    """
    if gate_up.is_cuda and gate_up.dtype is not torch.float64:
        if passing is not None:
            from fxtune.kernels import swiglu_reduce_triton

            passing.totals = swiglu_reduce_triton.backward(
                act,
                gate_up,
                dp,
                out,
                passing.xa,
                passing.dyb,
                passing.ranks,
                passing.totals,
                (share[1], above[1]),
                passing.keep_p,
            )
            return out
        from fxtune.kernels.swiglu_lora_triton import backward

        backward(act, gate_up, dp, out, share, above)
        return out
    gate, up = _wide(gate_up).addmm(_wide(share[0]), _wide(share[1]).t()).chunk(2, -1)
    activated, slope = _act(act, gate)
    gradient = _wide(dp).addmm(_wide(above[0]), _wide(above[1]))
    out.copy_(torch.cat([gradient * up * slope, gradient * activated], -1))
    dp.copy_(activated * up)
    if passing is not None:
        of_b, of_a = (
            (_wide(wide).t() @ _wide(narrow)).unsqueeze(0) for wide, narrow in ((out, passing.xa), (dp, passing.dyb))
        )
        b, a = passing.totals
        passing.totals = of_b if b is None else b.add_(of_b), of_a if a is None else a.add_(of_a)
    return out


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype is torch.float64 else x.float()


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
