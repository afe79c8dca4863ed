"""Learning-rate schedules: a pure function of the step, so there is no scheduler state to save."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
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
    warmup_steps: int = field(default=0, metadata={"min": 0})
    """Steps of linear warm-up. When 0, warmup_ratio decides."""
    warmup_ratio: float = field(default=0.03, metadata={"min": 0, "max": 1})
    """Share of the run spent warming up."""
    min_lr_ratio: float = field(default=0.0, metadata={"min": 0, "max": 1})
    """Where decay ends, as a share of optimizer.lr."""
    decay_ratio: float = field(default=0.2, metadata={"min": 0, "max": 1})
    """wsd only: the share of the run spent decaying."""


def learning_rate(config: ScheduleConfig, peak: float, step: int, steps: int) -> float:
    """The learning rate of step `step` (0-based) of a run of `steps`; `peak` is optimizer.lr.

    The rate is not 0 in the first step (warm-up counts from 1) nor in the last: decay reaches `min_lr_ratio` one step
    after the run's end.
    """
    warmup = min(config.warmup_steps or math.ceil(config.warmup_ratio * steps), steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    if config.name is ScheduleName.constant:
        return peak
    decay = steps - warmup
    if config.name is ScheduleName.wsd:
        decay = min(decay, math.ceil(config.decay_ratio * steps))
    done = max(0.0, (step - (steps - decay)) / max(decay, 1))
    left = 0.5 * (1 + math.cos(math.pi * done)) if config.name is ScheduleName.cosine else 1 - done
    return peak * (config.min_lr_ratio + (1 - config.min_lr_ratio) * left)
