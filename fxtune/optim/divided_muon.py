"""Muon for matrices that are divided by rows over ranks (parallel.shard).

Muon makes the update of a whole matrix orthogonal. But a rank has only some rows of the matrix. Each rank keeps the
momentum of its rows. Then N ranks share the work on N matrices: rank i gets all rows of the update of matrix i, makes
the update orthogonal, and sends the rows back. Both exchanges are in bfloat16, Muon's own precision, so N ranks and
one process get the same numbers. A rank sends 4 (N - 1) / N bytes for each weight that it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from fxtune.distributed.sharding import Sharding
from fxtune.upstream import torch as upstream


class Matrix(NamedTuple):
    """A divided matrix."""

    own: nn.Parameter
    """This rank's rows, perhaps none."""
    shape: torch.Size
    """The shape of the whole matrix."""


class DividedMuon(torch.optim.Muon):
    """torch.optim.Muon over `matrices`. All ranks of `sharding` give the same matrices in the same order."""

    def __init__(self, matrices: Sequence[Matrix], sharding: Sharding, **options: Any) -> None:
        self.orthogonal, self.adjusted = upstream.muon_parts()
        super().__init__([matrix.own for matrix in matrices if matrix.own.numel()], **options)
        self.matrices, self.sharding = matrices, sharding

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the rows of this rank. All ranks call this together."""
        assert closure is None
        world = self.sharding.world
        group = world.weights_group
        ranks, me = dist.get_world_size(group), dist.get_rank(group)
        options = self.param_groups[0]

        def exchange(parts: list[torch.Tensor], sizes: list[int]) -> list[torch.Tensor]:
            """Send `parts[i]` to rank i and return the `sizes[i]` numbers that rank i sends here."""
            sent = torch.cat(parts).view(torch.uint8)
            received = torch.empty(2 * sum(sizes), dtype=torch.uint8, device=sent.device)
            with world.waiting("making updates orthogonal"):
                dist.all_to_all_single(
                    received, sent, [2 * size for size in sizes], [2 * len(part) for part in parts], group=group
                )
            return list(received.view(torch.bfloat16).split(sizes))

        for first in range(0, len(self.matrices), ranks):
            turn = self.matrices[first : first + ranks]
            updates = [self._update(matrix.own, options) for matrix in turn]
            nothing = updates[0].new_empty(0)
            updates += [nothing] * (ranks - len(turn))
            mine = turn[me].shape if me < len(turn) else torch.Size((0, 0))
            sizes = [len(range(mine[0])[rows]) * mine[1] for rows in _rows(mine[0], ranks)]
            pieces = exchange([update.flatten() for update in updates], sizes)
            if me < len(turn):
                whole = torch.cat(pieces).view(mine)
                whole = self.orthogonal(whole, options["ns_coefficients"], options["ns_steps"], options["eps"])
                pieces = [whole[rows].flatten() for rows in _rows(mine[0], ranks)]
            for matrix, update in zip(turn, exchange(pieces, [update.numel() for update in updates]), strict=False):
                self._apply_to(matrix, update, options)

    def _update(self, own: nn.Parameter, options: dict[str, Any]) -> torch.Tensor:
        """Update the momentum of this rank's rows. Returns the rows' update in bfloat16, zeros without a gradient."""
        if own.grad is None or not own.numel():
            return torch.zeros_like(own, dtype=torch.bfloat16)
        state = self.state[own]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(own.grad)
        momentum = options["momentum"]
        state["momentum_buffer"].lerp_(own.grad, 1 - momentum)
        update: torch.Tensor = state["momentum_buffer"]
        return (own.grad.lerp(update, momentum) if options["nesterov"] else update).to(torch.bfloat16)

    def _apply_to(self, matrix: Matrix, update: torch.Tensor, options: dict[str, Any]) -> None:
        own, lr = matrix.own, float(options["lr"])
        if own.grad is not None and own.numel():
            own.mul_(1 - lr * options["weight_decay"])
            own.add_(update.view_as(own), alpha=-self.adjusted(lr, options["adjust_lr_fn"], matrix.shape))


def _rows(count: int, ranks: int) -> list[slice]:
    """The rows of each rank, as torch's fully_shard divides `count` rows."""
    most = -(-count // ranks)
    return [slice(min(rank * most, count), min((rank + 1) * most, count)) for rank in range(ranks)]
