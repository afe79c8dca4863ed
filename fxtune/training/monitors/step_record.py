"""The metrics of a step, kept until its log line is written."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

MONITORED = ("loss", "grad_norm", "finite", "loss_scale", "spike_limit")
"""Metrics that every step has (TrainStep). Objectives add more metrics."""


@dataclass
class StepRecord:
    """The metrics of one step, on the host. `step` counts from 0."""

    loss: float
    grad_norm: float
    finite: float
    loss_scale: float
    spike_limit: float
    step: int
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the objective."""

    @property
    def scale_too_large(self) -> bool:
        """Whether the loss is finite and the gradient is not, with a loss scale above 1: the scale may be too large.
        It is then halved, from 65536 at most 16 times, so a run with other problems still ends."""
        return not self.finite and self.loss_scale > 1 and math.isfinite(self.loss)

    @property
    def spike(self) -> bool:
        return bool(self.finite) and self.loss > self.spike_limit

    @property
    def bad(self) -> bool:
        """Whether the step is a spike, or is not finite for another reason than the loss scale."""
        return self.spike or not (self.finite or self.scale_too_large)

    def to_json(self) -> list[Any]:
        """The list `[loss, grad_norm, finite, loss_scale, spike_limit, step]`, and `metrics` if there are any. Null
        stands for a number that is not finite."""
        row: list[Any] = [_finite_or_none(getattr(self, name)) for name in MONITORED] + [self.step]
        return [*row, {name: _finite_or_none(value) for name, value in self.metrics.items()}] if self.metrics else row

    @staticmethod
    def from_json(row: list[Any]) -> StepRecord:
        values, (step, *rest) = row[: len(MONITORED)], row[len(MONITORED) :]
        metrics = {name: _number_or_nan(value) for name, value in rest[0].items()} if rest else {}
        return StepRecord(**dict(zip(MONITORED, map(_number_or_nan, values), strict=True)), step=step, metrics=metrics)


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _number_or_nan(value: float | None) -> float:
    return math.nan if value is None else value
