"""The exchange of parts between ranks as an operator of torch: differentiable, and one node for torch.compile.

Every rank cuts a tensor into a part for each rank, sends part i to rank i, and gets a part from each rank. A second
exchange restores the tensor, so the same operator exchanges the gradient. On a GPU the host does not wait.
"""

from __future__ import annotations

import socket
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fxtune.errors import LostRankError, first_line
from fxtune.system.process.oom import out_of_memory_reason
from fxtune.upstream import torch as upstream


@torch.library.custom_op("fxtune::all_to_all", mutates_args=())
def all_to_all(parts: Tensor, group: str) -> Tensor:
    """Send `parts[i]` to rank i of the process group with the name `group`. Element i of the result is from rank i.

    `parts`: [ranks, ...], with one shape and dtype on all ranks. Raises LostRankError if a rank is gone.
    """
    received = torch.empty_like(parts, memory_format=torch.contiguous_format)
    exchange(received, parts.contiguous(), group, "share rows")
    return received


def exchange(
    received: Tensor,
    sent: Tensor,
    group: str,
    purpose: str,
    receives: list[int] | None = None,
    sends: list[int] | None = None,
) -> None:
    """Fill `received` with the parts for this rank. `receives`, `sends`: the lengths of the parts from and for each
    rank; None: equal parts. `purpose`: what the ranks of the group do. Raises LostRankError if a rank is gone."""
    members = upstream.process_group(group)
    try:
        dist.all_to_all_single(received, sent, receives, sends, group=members)
    except RuntimeError as error:
        if out_of_memory_reason(error):  # NCCL reports that memory ran out
            raise
        raise LostRankError(
            f"Rank {members.rank()} of the {members.size()} that {purpose} ({socket.gethostname()}) lost another rank "
            f"while exchanging tokens: {first_line(error)}. The same command goes on from the last checkpoint."
        ) from error


@all_to_all.register_fake
def _(parts: Tensor, group: str) -> Tensor:
    return torch.empty_like(parts, memory_format=torch.contiguous_format)


def _setup(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
    ctx.group = inputs[1]


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return torch.ops.fxtune.all_to_all(gradient, ctx.group), None


all_to_all.register_autograd(_backward, setup_context=_setup)
