"""Loss spikes: steps whose loss is far above that of the steps before, seen on the device while they run.

A step is a spike if its loss is above `median + threshold x spread` of the last `window` steps. The median and the spread (1.4826
times the median absolute deviation, which is one standard deviation where losses are normally distributed; Hampel 1974) are not
moved by the spikes themselves, as a mean would be: up to half of a window may be outliers. The spread counts as a FLOOR-th of the
median at least, for losses that hardly differ. Every loss enters the window, those of spikes too: where the level of
the loss has changed for good, half a window later it is no longer a spike, and skipping ends by itself.

What it costs is a dozen launches of kernels for `window` numbers a step; nothing waits for them (scripts/bench/bench_guards.py).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from fxtune.config.root import Spikes

FLOOR = 0.01
FEWEST = 4
"""A step is judged once there are a FEWEST-th of a window of steps before it."""


class SpikeWindow:
    """The losses of the last `size` steps, float32 on `device`. `off`: nothing is a spike."""

    def __init__(self, device: torch.device, kind: Spikes, size: int, threshold: float) -> None:
        self.kind, self.size, self.threshold = kind, size, threshold
        self.losses = torch.full((size,), math.nan, device=device)
        self.taken = 0
        """Losses so far; the next one's place is this modulo `size`."""
        self._none = torch.full((), math.inf, device=device)

    @torch.no_grad()
    def limit(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss above which a step whose loss is `loss` is a spike, a scalar on the device; infinity before there is enough
        to judge by. Takes `loss` into the window.
        """
        if self.kind is Spikes.off:
            return self._none
        limit, count = self._none, min(self.taken, self.size)
        if count >= max(1, self.size // FEWEST):
            seen = self.losses[
                :count
            ]  # a ring, but the order does not matter; sorting puts NaN last, as if it were high
            median = seen.sort().values[(count - 1) // 2]
            spread = (seen - median).abs().sort().values[(count - 1) // 2]
            limit = median + self.threshold * torch.maximum(1.4826 * spread, FLOOR * median)
            limit = limit.nan_to_num(
                nan=math.inf, posinf=math.inf
            )  # most of the window was not finite: nothing to judge by
        self.losses[self.taken % self.size].copy_(loss)
        self.taken += 1
        return limit

    def taken_up(self, limit: torch.Tensor, loss: torch.Tensor, finite: torch.Tensor) -> torch.Tensor:
        """Whether the step updates the weights: it is `finite`, and no spike where those are skipped. A bool on the device."""
        return finite & (loss <= limit) if self.kind is Spikes.skip else finite

    def state(self) -> dict[str, Any]:
        """What a resumed run needs to judge the next step alike. Waits for the device."""
        losses = [loss if math.isfinite(loss) else None for loss in self.losses.tolist()]
        return {} if self.kind is Spikes.off else {"losses": losses, "taken": self.taken}

    def load(self, state: dict[str, Any]) -> None:
        """Take back what `state` gave; nothing where the window has another size now."""
        if len(state.get("losses", ())) == self.size:
            self.losses.copy_(torch.tensor([math.nan if loss is None else loss for loss in state["losses"]]))
            self.taken = state["taken"]
