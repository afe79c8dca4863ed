"""Local steps: each rank trains alone for K steps, then all weights are averaged (local SGD, arXiv 1805.09767).

Only weights are sent, once in K steps, so a step sends 1/K of the bytes of summed gradients. Every rank multiplies its
gradient by the number of ranks, because losses are divided by the tokens of all ranks. Without momentum, K = 1 would
give the same weights as summed gradients. Optimizer states differ between ranks from the first step on and are not
averaged, so a checkpoint has the state of every rank.

torch's averager for post-local SGD (torch.distributed.algorithms.model_averaging) has the same arithmetic, and a test
compares the results. fxtune does not use it: it moves every weight to a new buffer (this breaks CUDA graphs), skips
weights whose gradient was dropped, and does not put its count of steps into checkpoints.

Averages are taken in float32. In bfloat16 each average would round the weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from fxtune.distributed.world import World
from fxtune.upstream import torch as upstream

PIECE = 64 * 2**20
"""Bytes of float32 that are averaged at once, so that an average needs memory for one piece, not for all weights."""


class WeightAverage:
    """Averages `weights` over the ranks of `world` after every `every` steps."""

    def __init__(self, world: World, weights: Iterable[torch.Tensor], every: int) -> None:
        self.world, self.weights, self.every = world, list(weights), every
        self.steps = 0
        """Local steps since the last average. 0: all ranks have the same weights."""

    def stepped(self) -> None:
        """Count a step that was taken, or skipped on all ranks. Average if `every` steps are complete."""
        self.steps += 1
        if self.steps == self.every:
            self.average()

    @torch.no_grad()
    def average(self) -> None:
        """Average now, unless nothing has changed since the last average. All ranks call this together."""
        if self.steps == 0:
            return
        for piece in _pieces(self.weights):
            self._average(piece)
        self.steps = 0

    def _average(self, weights: list[torch.Tensor]) -> None:
        sizes = [weight.numel() for weight in weights]
        flat = torch.empty(sum(sizes), dtype=torch.float32, device=weights[0].device)
        parts = [part.view(weight.shape) for part, weight in zip(flat.split(sizes), weights, strict=True)]
        upstream.foreach("copy_", parts, weights)
        self.world.sum(flat, "averaging weights").div_(self.world.size)
        upstream.foreach("copy_", weights, parts)


def _pieces(weights: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield lists of views, of whole weights or of rows, that together cover `weights`. A list has at most PIECE bytes
    in float32, or a single row."""
    piece: list[torch.Tensor] = []
    room = PIECE // 4
    for weight in weights:
        rows = max(1, PIECE // 4 // max(1, weight[0].numel())) if weight.dim() and len(weight) else 1
        for part in weight.detach().split(rows) if weight.dim() else [weight.detach()]:
            if piece and part.numel() > room:
                yield piece
                piece, room = [], PIECE // 4
            piece.append(part)
            room -= part.numel()
    if piece:
        yield piece
