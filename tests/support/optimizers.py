"""A small model, and all optimizer cases for it."""

from __future__ import annotations

import torch
from torch import nn

from fxtune.checkpoint.manager import CheckpointConfig, Checkpoints
from fxtune.checkpoint.train_state import TrainState
from fxtune.optim.config import Moments, OptimizerConfig, OptimizerName
from fxtune.optim.optimizer import Optimizer


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.up = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.wide = nn.Linear(16, 512, bias=False)  # large enough for 8-bit state
        self.frozen = nn.Linear(512, 16)
        self.head = nn.Linear(16, 11, bias=False)
        self.frozen.requires_grad_(False)

    def get_output_embeddings(self):
        return self.head

    def forward(self, ids):
        return self.head(self.frozen(self.wide(self.norm(self.up(self.embed(ids))))))


CASES = {
    **{name.value: {} for name in OptimizerName},
    "adamw/stochastic": {"name": "adamw", "stochastic_rounding": True},
    "adamw/stochastic/bfloat16": {"name": "adamw", "stochastic_rounding": True, "moments": Moments.bfloat16},
    "adamw_8bit/stochastic": {"name": "adamw_8bit", "stochastic_rounding": True},
}


def make(case, one_by_one=False, **options):
    torch.manual_seed(0)
    known = dict(CASES[case])
    model = Small().bfloat16() if "stochastic" in case else Small()
    config = OptimizerConfig(name=OptimizerName(known.pop("name", case)), **known, **options)
    return model, Optimizer(model, config, one_by_one=one_by_one)


def backward(model, seed):
    torch.manual_seed(seed)
    ids = torch.randint(0, 11, (4, 7))
    model(ids).logsumexp(-1).mean().backward()


def stored(optimizer, folder):
    """Write the optimizer state to a checkpoint and read it back."""
    tensors, scalars = optimizer.state()
    checkpoints = Checkpoints(folder, CheckpointConfig())
    checkpoints.save(TrainState(step=3, optimizer=scalars), {"none": torch.zeros(1)}, tensors)
    saved = checkpoints.load_newest()
    return saved.moments, saved.state.optimizer


YES = torch.tensor(True)
