"""Muon for matrices of which each rank holds rows, beside torch's for whole matrices."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.sharded import run_ranks
from torch import nn

from fxtune.distributed.chunks import Chunk, chunk_of, local
from fxtune.distributed.parallel import Degrees
from fxtune.distributed.world import World
from fxtune.optim.divided_muon import DividedMuon, Matrix

pytestmark = pytest.mark.slow
SHAPES = ((8, 6), (5, 12), (2, 4), (7, 3))
"""No number of ranks divides the rows of all matrices. Of three ranks the last one has no rows of the third matrix."""
OPTIONS: dict[str, Any] = dict(lr=0.1, momentum=0.9, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
STEPS = 20


def drawn(step: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=random) for shape in SHAPES]


def learn_divided(world: World) -> list[tuple[Chunk, np.ndarray, np.ndarray]]:
    """Of each matrix where this rank's rows lie, these rows after STEPS steps, and their momentum."""
    from torch.distributed.tensor import Shard, distribute_tensor

    world = world.divided(Degrees(shard=world.size))
    whole = [distribute_tensor(tensor, world.weights_mesh, [Shard(0)]) for tensor in drawn(100)]
    rows = [nn.Parameter(local(tensor)) for tensor in whole]
    matrices = [Matrix(own, tensor.shape) for own, tensor in zip(rows, whole, strict=True)]
    optimizer = DividedMuon(matrices, SimpleNamespace(world=world), **OPTIONS)  # type: ignore[arg-type]
    chunks = [chunk_of(tensor) for tensor in whole]
    for step in range(STEPS):
        for own, chunk, gradient in zip(rows, chunks, drawn(step), strict=True):
            own.grad = None if step == 3 else gradient[chunk.within(Chunk.whole(chunk.shape))].clone()
        optimizer.step()
    momenta = [optimizer.state[own]["momentum_buffer"] if own.numel() else own.detach() for own in rows]
    found = zip(chunks, rows, momenta, strict=True)
    return [(chunk, own.detach().numpy(), momentum.numpy()) for chunk, own, momentum in found]


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_with_rows_learn_what_one_process_learns_bit_for_bit(ranks):
    whole = [nn.Parameter(tensor) for tensor in drawn(100)]
    alone = torch.optim.Muon(whole, **OPTIONS)
    for step in range(STEPS):
        for weight, gradient in zip(whole, drawn(step), strict=True):
            weight.grad = None if step == 3 else gradient
        alone.step()
    covered = 0
    for parts in run_ranks(ranks, learn_divided):
        for (chunk, own, momentum), weight in zip(parts, whole, strict=True):
            place = chunk.within(Chunk.whole(chunk.shape))
            assert np.array_equal(own, weight.detach()[place])
            assert np.array_equal(momentum, alone.state[weight]["momentum_buffer"][place])
            covered += own.size
    assert covered == sum(tensor.numel() for tensor in whole)
