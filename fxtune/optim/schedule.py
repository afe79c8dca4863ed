"""Learning-rate schedules. A rate depends only on the step and on a few lengths, the fields of `Schedule`.

The lengths are saved with a run's state, because they may change: a run that ends early decays from then on, and a
finished run may be extended. WSD (warmup-stable-decay, arXiv 2404.06395) allows both. Before its decay the rate does
not depend on the end of the run, so the decay may begin at any checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any


class ScheduleName(str, Enum):
    cosine = "cosine"
    linear = "linear"
    constant = "constant"
    wsd = "wsd"


EXTENDABLE = (ScheduleName.wsd, ScheduleName.constant)
"""Schedules of runs that can be extended: the rate before the decay does not depend on the end of the run."""


@dataclass
class ScheduleConfig:
    name: ScheduleName = ScheduleName.cosine
    """`wsd`: warm up, stay, then decay over the last `decay_steps` (warmup-stable-decay)."""
    warmup_steps: float = field(default=0.03, metadata={"min": 0})
    """Steps of linear warm-up; a number below 1 is a share of the run."""
    min_lr_ratio: float = field(default=0.0, metadata={"min": 0, "max": 1})
    """The rate at which decay ends, as a share of optimizer.lr."""
    decay_steps: float = field(default=0.2, metadata={"min": 0})
    """wsd only: steps of decay; a number below 1 is a share of the run. A run that ends early decays over the
    same share of its steps."""


@dataclass(frozen=True)
class Schedule:
    """The learning rate of each step of a run. Steps count from the run's first step, 0."""

    config: ScheduleConfig
    peak: float
    """optimizer.lr."""
    planned: int
    """The steps that train.epochs and train.max_steps ask for."""
    steps: int
    """The length of warm-up, plateau and decay together."""
    last: int
    """The run ends after this many steps. A run that was cut off ends before `steps`."""
    warmup: int
    decay: int
    """Steps of decay at the end of `steps`."""
    dropped: int = 0
    """Steps that were taken and dropped when the run went back to an earlier checkpoint. Step s learns from the rows
    of step s - dropped of the data plan."""

    @staticmethod
    def of(config: ScheduleConfig, peak: float, steps: int) -> Schedule:
        """The schedule of a run of `steps` steps."""
        warmup = min(_steps(config.warmup_steps, steps), steps)
        decay = 0 if config.name is ScheduleName.constant else steps - warmup
        if config.name is ScheduleName.wsd:
            decay = min(decay, _steps(config.decay_steps, steps))
        return Schedule(config, peak, steps, steps, steps, warmup, decay)

    def saved(self) -> dict[str, int]:
        """The lengths, for resumed()."""
        return {name: getattr(self, name) for name in LENGTHS}

    def resumed(self, saved: Mapping[str, Any]) -> Schedule:
        """This schedule with the lengths that saved() returned. Raises ValueError for values that are no lengths."""
        if saved.keys() != set(LENGTHS) or any(type(value) is not int or value < 0 for value in saved.values()):
            raise ValueError(f"schedule: {dict(saved)} are not the lengths of a schedule")
        schedule = replace(self, **saved)
        length = schedule.steps - schedule.dropped
        if not (schedule.dropped <= schedule.last <= schedule.steps and schedule.decay <= length <= schedule.planned):
            raise ValueError(f"schedule: {dict(saved)} do not fit together")
        return schedule

    def rate(self, step: int) -> float:
        """The learning rate of step `step`. It is not 0 in the first step (warm-up counts from 1), nor in the last
        step: decay reaches `min_lr_ratio` one step after the end."""
        config, step, steps = self.config, step - self.dropped, self.steps - self.dropped
        warm = self.peak * (step + 1) / self.warmup if step < self.warmup else self.peak
        if config.name is ScheduleName.constant:
            return warm
        done = max(0.0, (step - (steps - self.decay)) / max(self.decay, 1))
        left = 0.5 * (1 + math.cos(math.pi * done)) if config.name is ScheduleName.cosine else 1 - done
        return min(warm, self.peak * (config.min_lr_ratio + (1 - config.min_lr_ratio) * left))

    @property
    def branches(self) -> bool:
        """Whether the decay may begin at any step."""
        return self.config.name is ScheduleName.wsd

    @property
    def decay_start(self) -> int:
        """The number of steps before the decay."""
        return self.steps - self.decay

    def decay_from(self, origin: int) -> int:
        """The length of a decay that begins after `origin` steps. It is the same share of the steps as in a whole run,
        and ends within the plan."""
        config = self.config
        share = min(config.decay_steps, 0.99)  # of all steps, the decay included
        decay = math.ceil(origin * share / (1 - share)) if config.decay_steps < 1 else _steps(config.decay_steps, 0)
        return max(1, min(decay, self.planned - origin))

    def decaying(self, step: int, origin: int, decay: int) -> Schedule:
        """The schedule of a run that has taken `step` steps, goes back to the weights of `origin` steps of the plan,
        and decays from there over `decay` steps."""
        end = step + decay
        return replace(self, steps=end, last=end, decay=decay, dropped=step - origin)

    def ending(self, last: int) -> Schedule:
        """The schedule of a run that now ends after `last` steps. Its rates stay the same, unless a decay of wsd
        begins before `last`: that decay is shortened to end there."""
        if not self.branches or last <= self.decay_start:
            return replace(self, last=last)
        return replace(self, steps=last, last=last, decay=last - self.decay_start)

    def extended(self, planned: int, step: int, origin: int) -> Schedule:
        """The schedule of a run that has taken `step` steps and goes on from the weights of `origin` steps of the plan
        until `planned`. Its warm-up is not repeated."""
        dropped = step - origin
        longer = Schedule.of(self.config, self.peak, planned)
        decay = min(longer.decay, planned - origin)
        end = planned + dropped
        return replace(self, planned=planned, steps=end, last=end, decay=decay, dropped=dropped)


def _steps(number: float, steps: int) -> int:
    """`number` as a number of steps. A number below 1 is a share of `steps`."""
    return math.ceil(number * steps if number < 1 else number)


LENGTHS = ("planned", "steps", "last", "warmup", "decay", "dropped")
"""The fields of a Schedule that are saved."""


def learning_rate(config: ScheduleConfig, peak: float, step: int, steps: int) -> float:
    """The learning rate of step `step`, counted from 0, in a run of `steps` steps. `peak` is optimizer.lr."""
    return Schedule.of(config, peak, steps).rate(step)
