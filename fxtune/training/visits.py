"""Passes without gradient over all batches of a plan: evaluations, and numbers that are stored before training."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fxtune.data.batches.batch import Batch
from fxtune.data.batches.loader import Loader
from fxtune.distributed.world import World
from fxtune.objectives.language_model import LanguageModel
from fxtune.system.terminal.progress import phase
from fxtune.techniques.precision import Precision
from fxtune.training.agreement import together

Read = Callable[[Batch, int, int, bool], None]
"""A function that takes a batch, the index of its step, its position in the step, and whether it counts."""


@torch.no_grad()
def visit(
    model: LanguageModel,
    loader: Loader,
    precision: Precision,
    world: World,
    title: str,
    read: Read,
    shown: bool = False,
    first: int = 0,
    eval_mode: bool = True,
) -> None:
    """Call `read` with each batch of this rank's loader. `eval_mode`: whether `model` applies no dropout meanwhile.

    The ranks agree after every batch, so a rank that gets SIGTERM or SIGINT ends the visit of all ranks. `title`: the
    name of the work. `shown`: whether a line announces it. `first`: the first step of the plan.
    """
    training = model.model.training

    def read_next() -> bool:
        if (following := next(batches, None)) is None:
            return False
        with precision.context(loader.device):
            read(*following)
        return True

    try:
        model.model.train(not eval_mode)
        with phase(title, loader.plan.steps, "batches", announce=shown) as work:
            batches = (
                (batch, step.index, position, step.counted is None or position < step.counted)
                for step in work.over(loader.steps(first))
                for position, batch in enumerate(step.micro_batches)
            )
            while together(world, read_next):  # all ranks have equally many batches, so they end together
                pass
    finally:
        model.model.train(training)
