"""What the micro-batches of a step know of each other, for objectives with `needs.whole_step`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.nn import functional as F

from fxtune.distributed.world import World
from fxtune.objectives.base import Objective


@torch.no_grad()
def step_parts(
    objective: Objective, values: Sequence[torch.Tensor], world: World, failed: Exception | None = None
) -> list[torch.Tensor]:
    """The part of Objective.step_parts() for each micro-batch of this rank. The host does not wait for a GPU.

    `values`: the result of Objective.step_values() for each micro-batch of this rank. Every rank of `world` calls this
    function with at least one micro-batch. `failed`: the error because of which this rank has no values. This function
    raises the error when the other ranks know that there is one; their parts are then NaN.
    """
    rows = [len(of_batch) for of_batch in values]
    if world.size == 1:
        if failed is not None:
            raise failed
        return list(objective.step_parts(torch.cat([*values])).split(rows))
    counts = [int(count) for (count,) in world.exchange([-1.0 if failed else float(sum(rows))], "sizing a step")]
    if failed is not None:
        raise failed
    mine = torch.cat([*values])
    if min(counts) < 0:
        return list(objective.step_parts(torch.full_like(mine, math.nan)).split(rows))
    most, first = max(counts), max(counts) * world.rank
    everyone = world.gather_rows(F.pad(mine, (0, 0, 0, most - len(mine))), "collecting the values of a step")
    return list(objective.step_parts(everyone)[first : first + len(mine)].split(rows))
