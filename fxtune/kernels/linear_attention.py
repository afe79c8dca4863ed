"""Linear attention with a decaying state over packed documents, as one operator: the gated delta rule (Qwen3.5, arXiv
2412.06464), Kimi's delta attention (2510.26692), and Mamba-2's scan (2405.21060), which is simple gated linear
attention with q = C, k = B and v = x dt. recurrence.py has the formulas.

    which         decay g                  step beta
    delta         per head                 given
    kda           per key channel          given
    scan          per head                 none

On a GPU the kernels are flash-linear-attention's (package fla-core), which compute chunks of 64 tokens as matmuls; on
a CPU recurrence.py runs. `chunks` names for each chunk its document and its place there, so that the host need not
wait for the device to count them (document_chunks()). The backward pass reads further results of the operator, so
selective checkpointing can keep them or compute them again.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from fxtune.kernels import fla_package, recurrence
from fxtune.upstream import fla

CHUNK = fla.CHUNK
"""Tokens of a chunk: flash-linear-attention's kernels have no other size."""


def document_chunks(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """int32 [tokens // CHUNK + documents, 2]: (document, chunk in the document) of each chunk, in order.

    The host waits for nothing, so the number of chunks is the largest possible one. Unused chunks lie behind the last
    document's end."""
    counts = (cu_seqlens.diff() + CHUNK - 1) // CHUNK
    ends = counts.cumsum(0)
    at = torch.arange(tokens // CHUNK + len(counts), device=cu_seqlens.device)
    document = torch.searchsorted(ends, at, right=True).clamp(max=len(counts) - 1)
    within = torch.where(at < ends[-1], at - (ends - counts)[document], tokens // CHUNK + 1)
    return torch.stack([document, within], 1).int()


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Optional[Tensor],
    scale: float,
    cu_seqlens: Tensor,
    chunks: Tensor,
) -> Tensor:
    """[tokens, heads, V] in the dtype of v, for the documents that `cu_seqlens` (int32) bounds.

    q, k [tokens, key heads, K], each for heads / key heads value heads that follow one another. v [tokens, heads, V].
    g: the logarithm of the decay, float32 [tokens, heads] or [tokens, heads, K]. beta [tokens, heads], or None.
    `cu_seqlens` ends at `tokens`: padding is a document of its own.
    """
    return torch.ops.fxtune.linear_attention(q, k, v, g, beta, scale, cu_seqlens, chunks)[0]


_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor g, Tensor? beta, float scale, Tensor cu_seqlens, Tensor chunks"
_FOUR, _FIVE = (f"({', '.join(['Tensor'] * number)})" for number in (4, 5))


@torch.library.custom_op("fxtune::linear_attention", mutates_args=(), schema=f"({_INPUTS}) -> {_FOUR}")
def _linear_attention(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The result, and what the kernels' backward pass reads: sums of g within a chunk, and one or two matrices
    [tokens, heads, CHUNK]. Tensors that a recurrence does not need are empty."""
    given = fla.Inputs(*arguments)
    if given.q.is_cuda:
        fla_package.prepare()
        return fla.forward(given)
    out = recurrence.forward(_by_number(given)).to(given.v.dtype)
    return out, out.new_empty(0), out.new_empty(0), out.new_empty(0)


@_linear_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Optional[Tensor], *_: Any) -> tuple[Tensor, ...]:
    out, none = torch.empty_like(v, memory_format=torch.contiguous_format), v.new_empty(0)
    if not q.is_cuda:
        return out, none, none.clone(), none.clone()
    sums = torch.empty_like(g, dtype=torch.float32, memory_format=torch.contiguous_format)
    first, second = (k.new_empty(*v.shape[:2], CHUNK) for _ in range(2))
    if beta is None:
        return out, sums, none, none.clone()
    return out, sums, first, second if g.ndim == 3 else none


@torch.library.custom_op(
    "fxtune::linear_attention_backward",
    mutates_args=(),
    schema=f"(Tensor grad, {_INPUTS}, Tensor sums, Tensor first, Tensor second) -> {_FIVE}",
)
def _backward(grad: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v, g and beta, in their dtypes. Without beta its gradient is an empty tensor."""
    given = fla.Inputs(*arguments[:8])
    q, k, v, g, beta, *_ = given
    found = fla.backward(grad, given, *arguments[8:]) if q.is_cuda else recurrence.backward(_by_number(given), grad)
    dq, dk, dv, dg, dbeta = found
    dbeta = v.new_empty(0) if beta is None or dbeta is None else dbeta.to(beta.dtype)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dg.reshape(g.shape).to(g.dtype), dbeta


@_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Optional[Tensor], *_: Any) -> tuple[Tensor, ...]:
    results = (q, k, v, g, v.new_empty(0) if beta is None else beta)
    return tuple(torch.empty_like(of, memory_format=torch.contiguous_format) for of in results)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, g, beta, ctx.scale, cu_seqlens, chunks = inputs
    ctx.save_for_backward(q, k, v, g, beta, cu_seqlens, chunks, *output[1:])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    q, k, v, g, beta, *bounds, sums, first, second = ctx.saved_tensors
    found = torch.ops.fxtune.linear_attention_backward(grad, q, k, v, g, beta, ctx.scale, *bounds, sums, first, second)
    dq, dk, dv, dg, dbeta = found
    return dq, dk, dv, dg, None if beta is None else dbeta, None, None, None


_linear_attention.register_autograd(_gradients, setup_context=_setup)


def _flops(q: Any, k: Any, v: Any, g: Any, beta: Any, *_: Any, **__: Any) -> int:
    """FLOPs of the forward pass from the shapes of its tensors."""
    return v[0] * v[1] * fla.flops(_which(g, beta), k[-1], v[-1])[0]


def _backward_flops(grad: Any, q: Any, k: Any, v: Any, g: Any, beta: Any, *_: Any, **__: Any) -> int:
    forward, again = fla.flops(_which(g, beta), k[-1], v[-1])
    return v[0] * v[1] * (2 * forward + again)


def _which(g: Any, beta: Any) -> str:
    return "scan" if beta is None else "kda" if len(g) == 3 else "delta"


register_flop_formula(torch.ops.fxtune.linear_attention)(_flops)
register_flop_formula(torch.ops.fxtune.linear_attention_backward)(_backward_flops)


def _by_number(given: fla.Inputs) -> fla.Inputs:
    """`given` with g as [tokens, heads, K or 1]."""
    return given if given.g.ndim == 3 else given._replace(g=given.g.unsqueeze(-1))
