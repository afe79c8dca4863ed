"""Saves of small states."""

import torch

from fxtune.checkpoint.train_state import TrainState


def save(checkpoints, step, **state):
    checkpoints.save(
        TrainState(step=step, **state), {"w": torch.full((4,), float(step))}, {"w/exp_avg": torch.ones(4)}
    )
    checkpoints.wait()
    return checkpoints.folder / f"step-{step:08d}"
