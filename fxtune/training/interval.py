"""What the steps leave on the device between two log lines: read where figures are logged, so that no step waits for it."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch


class Outcome(NamedTuple):
    """Of one step: float32 scalars on the device, `finite` a bool (see Trainer.step)."""

    loss: torch.Tensor
    norm: torch.Tensor
    """Of the gradient, before clipping."""
    finite: torch.Tensor
    """Both of them. If not, nothing was updated."""
    scale: torch.Tensor
    """The loss scale that was used."""
    limit: torch.Tensor
    """The loss above which the step is a spike (fxtune/training/spikes.py)."""


class Taken(NamedTuple):
    """The same on the host."""

    loss: float
    norm: float
    finite: float
    scale: float
    limit: float
    step: int
    """Which, counted from 0."""

    @property
    def scale_alone(self) -> bool:
        """The gradient overflowed, under a loss scale that is too large yet: it was halved, and nothing else is wrong.
        From 65536 that happens 16 times at most, so a run whose numbers are bad still ends.
        """
        return not self.finite and self.scale > 1 and math.isfinite(self.loss)

    @property
    def spike(self) -> bool:
        return bool(self.finite) and self.loss > self.limit


class Interval:
    """What steps leave on the device between two log lines; `read`, and `settle` before a checkpoint, wait for it.

    `scaled`: a loss scale is in play, and worth a figure. `skips_spikes`: spikes were not taken either.
    """

    def __init__(self, scaled: bool = False, skips_spikes: bool = False):
        self.steps: list[torch.Tensor] = []
        self.posted: list[tuple[torch.Tensor, torch.cuda.Event | None]] = []
        """What is on its way to the host, and what says that it has arrived."""
        self.rows: list[Taken] = []
        self.suspects: list[Taken] = []
        """Steps not told of yet that were spikes, or not finite and not for their loss scale alone."""
        self.scaled, self.skips_spikes = scaled, skips_spikes
        self.step = 0
        """Of the whole run, the first that was not counted yet."""
        self.skipped = 0
        """Steps that did not touch the weights."""
        self.in_a_row = 0
        """How many of the latest steps were not finite and not for their loss scale alone."""
        self.spikes = 0

    def add(
        self, loss: torch.Tensor, norm: torch.Tensor, finite: torch.Tensor, scale: torch.Tensor, limit: torch.Tensor
    ) -> None:
        self.steps.append(torch.stack([loss, norm, finite.to(loss.dtype), scale, limit]))

    def post(self) -> None:
        """Send the figures of the steps so far on their way to the host."""
        if not self.steps:
            return
        figures, arrived = torch.stack(self.steps), None
        if figures.is_cuda:
            figures = torch.empty_like(figures, device="cpu", pin_memory=True).copy_(figures, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        self.posted.append((figures, arrived))
        self.steps.clear()

    def settle(self) -> None:
        """Count the steps so far: those that were skipped, and those that are suspect."""
        self.post()
        for figures, arrived in self.posted:
            if arrived is not None:
                arrived.synchronize()
            for loss, norm, finite, scale, limit in figures.tolist():
                self._count(Taken(loss, norm, finite, scale, limit, self.step))
                self.step += 1
        self.posted.clear()

    def _count(self, row: Taken) -> None:
        self.rows.append(row)
        self.spikes += row.spike
        self.skipped += not row.finite or (row.spike and self.skips_spikes)
        if row.finite:
            self.in_a_row = 0
        elif not row.scale_alone:
            self.in_a_row += 1
        if row.spike or not (row.finite or row.scale_alone):
            self.suspects.append(row)

    def read(self) -> dict[str, Any]:
        """Mean loss and gradient norm of the steps that were taken since the last reading; None where there was none."""
        self.settle()
        rows, self.rows = self.rows, []
        sound = [row[:2] for row in rows if row.finite and not (row.spike and self.skips_spikes)]
        mean = [sum(column) / len(sound) for column in zip(*sound, strict=True)] if sound else [None, None]
        figures = {"train/loss": mean[0], "train/grad_norm": mean[1], "train/skipped_steps": self.skipped}
        return {**figures, "train/loss_scale": rows[-1].scale} if self.scaled and rows else figures
