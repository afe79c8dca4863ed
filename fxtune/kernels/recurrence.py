"""Linear attention with a decaying state, a token at a time in float32: what the operators of linear_attention.py
compute, by its definition.

A head's state S [K, V] starts at zero in each document. Token t with query q, key k, value v, decay g and step b:

    S' = exp(g) S                       each row of S by its own factor, or all rows by one
    u  = b (v - S'^T k)                 with a delta rule (arXiv 2412.06464, 2510.26692); u = v without (2405.21060)
    S  = S' + k u^T                     o = scale * S^T q

The gradients follow the same steps backwards. Documents run side by side, so the cost is the length of the longest
document: it serves tests and small models on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Optional

import torch
from torch import Tensor

from fxtune.upstream.fla import Inputs


@torch.autocast("cpu", enabled=False)
def forward(given: Inputs) -> Tensor:
    """[tokens, heads, V] in float32. q, k: [tokens, key heads, K], each for heads / key heads value heads that follow
    one another; v: [tokens, heads, V]; g: [tokens, heads, K or 1]; beta: [tokens, heads], None: no delta rule."""
    q, k, v, g, beta = _float32(given)
    out = torch.empty_like(v)
    for rows, _, _, after in _states(k, v, g, beta, given.cu_seqlens):
        out[rows] = given.scale * torch.einsum("nhk,nhkv->nhv", q[rows], after)
    return out


@torch.autocast("cpu", enabled=False)
def backward(given: Inputs, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Optional[Tensor]]:
    """The gradients of forward()'s q, k, v, g and beta, in float32 and their shapes, for `grad` of its result."""
    groups, key_heads = given.v.shape[1] // given.k.shape[1], given.k.shape[1]
    (q, k, v, g, beta), scale, cu_seqlens = _float32(given), given.scale, given.cu_seqlens
    steps = list(_states(k, v, g, beta, cu_seqlens))
    dq, dk, dv, dg = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), torch.empty_like(g)
    dbeta = None if beta is None else torch.empty_like(beta)
    behind = v.new_zeros(len(cu_seqlens) - 1, *k.shape[1:], v.shape[-1])  # the gradient of each document's state
    for rows, before, u, after in reversed(steps):
        active, grads = len(rows), scale * grad[rows].float()
        dq[rows] = torch.einsum("nhv,nhkv->nhk", grads, after)
        state = behind[:active] + q[rows].unsqueeze(-1) * grads.unsqueeze(-2)
        du = torch.einsum("nhk,nhkv->nhv", k[rows], state)
        dk[rows] = torch.einsum("nhv,nhkv->nhk", u, state)
        decayed = g[rows].exp().unsqueeze(-1) * before
        if beta is not None and dbeta is not None:
            dbeta[rows] = (du * (v[rows] - torch.einsum("nhk,nhkv->nhv", k[rows], decayed))).sum(-1)
            du = beta[rows].unsqueeze(-1) * du
            dk[rows] -= torch.einsum("nhv,nhkv->nhk", du, decayed)
            state = state - k[rows].unsqueeze(-1) * du.unsqueeze(-2)
        dv[rows] = du
        by_row = (state * decayed).sum(-1)
        dg[rows] = by_row if g.shape[-1] > 1 else by_row.sum(-1, keepdim=True)
        behind[:active] = g[rows].exp().unsqueeze(-1) * state
    dq, dk = (of.unflatten(1, (key_heads, groups)).sum(2) for of in (dq, dk))
    return dq, dk, dv, dg, dbeta


def _float32(given: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor, Optional[Tensor]]:
    """q, k, v, g and beta in float32, with q and k repeated for the heads that share them."""
    q, k, v, g, beta, *_ = given
    groups = v.shape[1] // k.shape[1]
    q, k = (of.float().repeat_interleave(groups, 1) for of in (q, k))
    return q, k, v.float(), g.float(), None if beta is None else beta.float()


def _states(
    k: Tensor, v: Tensor, g: Tensor, beta: Optional[Tensor], cu_seqlens: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """For each place in a document: the tokens there, of the longest document first, the states [documents, heads, K,
    V] before them, their u [documents, heads, V], and the states after them."""
    starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff()
    lengths, order = lengths.sort(descending=True, stable=True)
    starts, left = starts[order], lengths.tolist()
    states = v.new_zeros(len(left), *k.shape[1:], v.shape[-1])
    for at in range(left[0] if left else 0):
        while left[-1] <= at:
            left.pop()
        rows, before = starts[: len(left)] + at, states[: len(left)]
        decayed, u = g[rows].exp().unsqueeze(-1) * before, v[rows]
        if beta is not None:
            u = beta[rows].unsqueeze(-1) * (u - torch.einsum("nhk,nhkv->nhv", k[rows], decayed))
        states = decayed + k[rows].unsqueeze(-1) * u.unsqueeze(-2)
        yield rows, before, u, states
