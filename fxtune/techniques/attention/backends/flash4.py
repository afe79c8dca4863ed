"""FlashAttention-4: the fastest backend on Hopper and Blackwell, and the only fused kernel that takes sinks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from fxtune.facts.run import Facts
from fxtune.kernels import flash4 as kernel
from fxtune.kernels.flash4 import Options
from fxtune.system.machine.packages import PACKAGES, SOME_HEADS, THESE_HEADS, Heads
from fxtune.techniques.attention.backends.backend import SINKS, Backend, Reason, head_widths, kind_of
from fxtune.techniques.attention.packed import one_document_a_row
from fxtune.techniques.smoke_tests import require_attention

WRONG_ON_HOPPER = {72, 80}
"""Widths of heads whose gradients are 7 % off (flash-attn-4 4.0.0b36, H200). The gradients of widths 64 and 88 are
right."""


class _Flash4(Backend):
    def refused_heads(self, facts: Facts) -> Iterator[Reason]:
        """Hopper supports heads of 8 to 256. Blackwell supports heads of 8 to 128, of 256, and DeepSeek's (keys of 192
        with values of 128). Source: flash_attn/cute/interface.py."""
        widths, generation = head_widths(facts), (facts.capability or (9, 0))[0]
        if generation == 9 and widths & WRONG_ON_HOPPER:
            yield f"has wrong gradients for heads of {min(widths & WRONG_ON_HOPPER)} on Hopper", "Use sdpa, or auto"
        most = 256 if generation == 9 else 128
        special = 9 < generation < 12 and widths in ({256}, {128, 192})
        if not special and any(width > most or width % 8 for width in widths):
            heads = f"takes heads of 8 to {most} in steps of 8 here, and this model's have {max(widths)}"
            yield heads, "Use sdpa, or auto"

    def more_refusals(self, facts: Facts) -> Iterator[Reason]:
        if facts.deterministic and (facts.capability or (9, 0))[0] >= 12:
            yield "has no deterministic backward pass on this GPU", "Set run.deterministic=false, or use sdpa"
        if kind_of(facts) in SINKS and (facts.capability or (9, 0))[0] >= 12:
            yield f"does not support {kind_of(facts)}'s attention sinks on this GPU", "Use flex, or auto"


def attend(q: Tensor, k: Tensor, v: Tensor, options: Options, _: float = 0.0) -> Tensor:
    if options.sinks is not None and q.dtype != torch.float32:  # the package takes bfloat16 sinks only
        options = options._replace(sinks=options.sinks.to(torch.bfloat16))
    flash4: Callable[..., tuple[Tensor, ...]] = torch.ops.fxtune.flash4
    # A short row would compile another variant of the kernels for rows.
    long = q.shape[1] >= kernel.MIN_BOUND
    if long and options.cu_seqlens_k is None and one_document_a_row(len(q), options.cu_seqlens):
        return flash4(q, k, v, *options._replace(cu_seqlens=None))[0]
    # In training q, k and v are views of [rows, length, heads, d] tensors, so flatten() copies nothing.
    return flash4(*(x.flatten(0, 1) for x in (q, k, v)), *options)[0].unflatten(0, q.shape[:2])


def smoke_test(device: torch.device, heads: Heads) -> str:
    """Run causal attention to documents of a packed row, by the call that training makes."""
    bounds = torch.tensor([0, 256], dtype=torch.int32, device=device)

    def flash_attn(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        assert causal
        out: Tensor = kernel.flash4(q[0], k[0], v[0], bounds, 256, q.shape[-1] ** -0.5, 0, 0.0)[0]
        return out[None]

    try:
        return require_attention(device, flash_attn, heads)
    except Exception as error:
        if heads == SOME_HEADS:
            raise
        require_attention(device, flash_attn)  # raises if the package fails with all heads
        raise RuntimeError(f"{error} ({THESE_HEADS})") from error


def compile_ahead(device: torch.device, heads: Heads, part: int) -> None:
    """Compile a group of kernels for causal attention. The results of the call are not used.

    `part`: 0 to 2: the forward pass, the backward pass and the deterministic backward pass over packed documents; 3 to
    5: the same three over rows of one document each.
    """
    packed, forward = part < 3, part % 3 == 0
    torch.use_deterministic_algorithms(part % 3 == 2)
    length, width = kernel.MIN_BOUND, heads.width
    sizes = [(1, length, count, width) for count in (heads.queries, heads.keys, heads.keys)]
    bounds = torch.tensor([0, length], dtype=torch.int32, device=device) if packed else None
    q, k, v = (torch.zeros(size[packed:], device=device, dtype=torch.bfloat16) for size in sizes)
    given = bounds, length, width**-0.5, 0, 0.0
    if forward:
        kernel.flash4(q, k, v, *given)
    else:
        lse = torch.zeros((1, heads.queries, length)[packed:], device=device)
        kernel.flash4_backward(q, q, k, v, q, lse, *given)


FLASH4 = _Flash4(
    "flash4",
    "fxtune_fa4",
    "FlashAttention-4",
    r"^fxtune::flash4$",
    operators=("fxtune.flash4",),
    core=attend,
    package=PACKAGES["flash-attn-4"],
    capability=((9, 0), (13, 0)),
    softcap=True,
    sinks=True,
    shares=True,
    recordable=True,
)
