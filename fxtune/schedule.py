"""The learning rate at step s: a pure function, so there is no scheduler state to save."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class ScheduleName(str, Enum):
    cosine = "cosine"
    linear = "linear"
    constant = "constant"
    wsd = "wsd"


@dataclass
class ScheduleConfig:
    name: ScheduleName = ScheduleName.cosine
    """`wsd`: warm up, stay, then decay over the last `decay_ratio` of the run (warmup-stable-decay)."""
    warmup_steps: int = 0
    """Steps of linear warm-up. When 0, warmup_ratio decides."""
    warmup_ratio: float = 0.03
    """Share of the run spent warming up."""
    min_lr_ratio: float = 0.0
    """Where decay ends, as a share of optimizer.lr."""
    decay_ratio: float = 0.2
    """wsd only: the share of the run spent decaying."""
