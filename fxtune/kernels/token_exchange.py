"""Exchanges tokens between ranks that divide the experts of a layer: each rank holds some experts whole.

Every rank gets the hidden states, the chosen experts and the weights of all tokens of its group (gather_tokens). It
computes the rows of the experts that it holds (own_rows), and sends each rank the partial sums of that rank's tokens.
The receiving rank adds them up (sum_tokens). gather_tokens is the backward pass of sum_tokens, and the other way
round. No token is dropped.

With top-8 routing over the 2 to 8 cards of a host most tokens have an expert on most ranks. Sending a token only to
the ranks of its experts would save little: almost nothing on 2 ranks, a third on 8. Sending all tokens to all ranks
makes the number of received tokens independent of the routing, and a token travels once for all its experts on a rank.

Partial sums travel in the dtype of the experts and are added in float32, in the order of the ranks: the same bits in
each run. The ranks may have different numbers of tokens, which set_tokens() sets. own_rows() waits for the device once
in each layer, so that tensors with a row for each pair of a token and an expert are no longer than this rank's share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fxtune.kernels.all_to_all import exchange
from fxtune.kernels.grouped_matmul import OwnRouting
from fxtune.upstream import torch as upstream

_TOKENS: dict[str, list[int]] = {}
"""Name of a process group -> the tokens of each of its ranks in the newest forward pass."""


class Exchange(NamedTuple):
    """Where a layer's experts are: this rank holds `experts` of them, from expert `first` on."""

    group: str
    """The name of the process group that holds all experts of the layer."""
    first: int
    experts: int

    def route(self, index: Tensor) -> OwnRouting:
        """The rows of this rank's experts for the tokens of all ranks. `index` [tokens, k]: the experts of this rank's
        tokens."""
        return OwnRouting(*own_rows(index, *self[1:], self.group))

    def gather(self, states: Tensor, routing: OwnRouting) -> Tensor:
        """[tokens of all ranks, ...]: all ranks' `states` [tokens, ...], one rank after the other."""
        return gather_tokens(states, routing.tokens, self.group)

    def sum(self, states: Tensor, tokens: int) -> Tensor:
        """[tokens, d]: for this rank's tokens the sum of all ranks' `states` [tokens of all ranks, d]."""
        return sum_tokens(states, tokens, self.group)

    def anywhere(self, flags: Tensor) -> Tensor:
        """Whether each of the bool `flags` is set on at least one rank of the group."""
        counts = flags.int()
        dist.all_reduce(counts, group=upstream.process_group(self.group))
        return counts > 0


def set_tokens(group: str, tokens: Sequence[int]) -> None:
    """Say how many tokens each rank of `group` has in the next forward pass and its backward pass."""
    _TOKENS[group] = list(tokens)


@torch.library.custom_op("fxtune::own_rows", mutates_args=())
def own_rows(index: Tensor, first: int, experts: int, group: str) -> tuple[Tensor, Tensor, Tensor]:
    """The attributes of an OwnRouting: order [rows], back [tokens of all ranks, k] and ends [experts].

    `index` [tokens, k]: the experts of this rank's tokens. Waits for the device.
    """
    return sorted_rows(_gather(index, group), first, experts)


def sorted_rows(index: Tensor, first: int, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """own_rows() for the experts `index` [tokens, k] of all ranks' tokens, without an exchange."""
    local = index.flatten() - first
    # Sorting puts the rows of other ranks' experts at the end, where they are cut off.
    key, order = torch.where((local >= 0) & (local < experts), local, experts).sort(stable=True)
    ends = torch.searchsorted(key, torch.arange(experts, device=key.device), right=True, out_int32=True)
    order = order[: int(ends[-1])].clone()
    back = torch.full_like(key, -1)
    back[order] = torch.arange(len(order), device=key.device)
    return order, back.view_as(index), ends


@own_rows.register_fake
def _(index: Tensor, first: int, experts: int, group: str) -> tuple[Tensor, Tensor, Tensor]:
    context = torch.library.get_ctx()
    order = index.new_empty(context.new_dynamic_size(), dtype=torch.int64)
    back = index.new_empty(context.new_dynamic_size(), index.shape[1], dtype=torch.int64)
    return order, back, index.new_empty(experts, dtype=torch.int32)


@torch.library.custom_op("fxtune::gather_tokens", mutates_args=())
def gather_tokens(states: Tensor, rows: int, group: str) -> Tensor:
    """[rows, ...]: the `states` [tokens, ...] of all ranks, one rank after the other. `rows`: how many tokens all
    ranks have together."""
    return _gather(states, group)


@torch.library.custom_op("fxtune::sum_tokens", mutates_args=())
def sum_tokens(states: Tensor, tokens: int, group: str) -> Tensor:
    """[tokens, ...]: for this rank's tokens the sum of all ranks' `states`. `states` [rows, ...]: a partial sum for
    each token of all ranks, one rank after the other. `tokens`: how many tokens this rank has."""
    counts = _TOKENS[group]
    received = states.new_empty(len(counts) * tokens, *states.shape[1:])
    _exchange(received, states.contiguous(), [tokens] * len(counts), counts, group)
    wide = torch.promote_types(states.dtype, torch.float32)
    return received.unflatten(0, (len(counts), tokens)).sum(0, dtype=wide).to(states.dtype)


@gather_tokens.register_fake
@sum_tokens.register_fake
def _(states: Tensor, length: int, group: str) -> Tensor:
    return states.new_empty(length, *states.shape[1:])


def _setup(ctx: Any, inputs: tuple[Tensor, int, str], output: Tensor) -> None:
    ctx.length, ctx.group = inputs[0].shape[0], inputs[2]


def _sum_gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return torch.ops.fxtune.sum_tokens(gradient, ctx.length, ctx.group), None, None


def _gather_gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return torch.ops.fxtune.gather_tokens(gradient, ctx.length, ctx.group), None, None


gather_tokens.register_autograd(_sum_gradients, setup_context=_setup)
sum_tokens.register_autograd(_gather_gradients, setup_context=_setup)


def _gather(states: Tensor, group: str) -> Tensor:
    counts, tokens = _TOKENS[group], len(states)
    received = states.new_empty(sum(counts), *states.shape[1:])
    copies = states.expand(len(counts), *states.shape).flatten(0, 1).contiguous()
    _exchange(received, copies, counts, [tokens] * len(counts), group)
    return received


def _exchange(received: Tensor, sent: Tensor, receives: list[int], sends: list[int], group: str) -> None:
    assert sum(sends) == len(sent), "set_tokens() knows the pass"
    exchange(received, sent, group, "divide experts", receives, sends)
