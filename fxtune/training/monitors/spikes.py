"""Detects loss spikes on the device: steps whose loss is far above the losses of earlier steps.

A step is a spike if its loss is above `median + threshold x spread` of the last `window` steps. The spread is 1.4826
times the median absolute deviation. It equals the standard deviation of normally distributed losses (Hampel 1974), and
is at least MIN_SPREAD of the median. A spike is also at least LEAST nats above the median: a model that has memorised
its rows has losses near 0.004, where a loss of 0.03 is normal. Outliers in up to half of the window do not move median
and spread. Losses of spikes also enter the window. So if the loss stays at a new level, skipping ends after half a
window.

Cost: a dozen kernel launches on `window` numbers a step; nothing waits for them.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from fxtune.config.root import Spikes

MIN_SPREAD = 0.01
WINDOW, THRESHOLD = 64, 8.0
LEAST = 0.05
"""A spike's loss is at least this number of nats above the median."""
MIN_FILLED = 4
"""Steps are judged after 1 / MIN_FILLED of the window is filled."""


class SpikeWindow:
    """The losses of the last `size` steps, float32 on `device`. With kind `off` no step is a spike."""

    def __init__(self, device: torch.device, kind: Spikes, size: int, threshold: float) -> None:
        self.kind, self.size, self.threshold = kind, size, threshold
        self.losses = torch.full((size,), math.nan, device=device)
        self.taken = 0
        """Number of losses so far. The next loss is written at this index modulo `size`."""
        self._no_limit = torch.full((), math.inf, device=device)

    @torch.no_grad()
    def limit(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss above which this step is a spike, a scalar on the device; infinity while there are too few losses.

        The limit is computed from the losses before `loss`. Then `loss` is added to the window.
        """
        if self.kind is Spikes.off:
            return self._no_limit
        limit, count = self._no_limit, min(self.taken, self.size)
        if count >= max(1, self.size // MIN_FILLED):
            # The order of the losses does not matter. sort() puts NaN last, as if it were the highest loss.
            losses = self.losses[:count]
            median = losses.sort().values[(count - 1) // 2]
            spread = (losses - median).abs().sort().values[(count - 1) // 2]
            above = self.threshold * torch.maximum(1.4826 * spread, MIN_SPREAD * median)
            limit = median + above.clamp(min=LEAST)
            limit = limit.nan_to_num(nan=math.inf, posinf=math.inf)  # no limit if most of the window is not finite
        self.losses[self.taken % self.size].copy_(loss)
        self.taken += 1
        return limit

    def updates_weights(self, limit: torch.Tensor, loss: torch.Tensor, finite: torch.Tensor) -> torch.Tensor:
        """Whether the step updates the weights, a bool on the device: it is finite and, if spikes are skipped, no
        spike."""
        return finite & (loss <= limit) if self.kind is Spikes.skip else finite

    def state(self) -> dict[str, Any]:
        """The state that a resumed run needs to judge the next step as this run would. Waits for the device."""
        losses = [loss if math.isfinite(loss) else None for loss in self.losses.tolist()]
        return {} if self.kind is Spikes.off else {"losses": losses, "taken": self.taken}

    def load(self, state: dict[str, Any]) -> None:
        """Restore what state() returned. Does nothing if the window now has another size."""
        if len(state.get("losses", ())) == self.size:
            self.losses.copy_(torch.tensor([math.nan if loss is None else loss for loss in state["losses"]]))
            self.taken = state["taken"]
