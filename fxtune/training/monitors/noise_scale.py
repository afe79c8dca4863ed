"""Estimates the gradient noise scale: the size up to which a larger global batch pays (McCandlish et al., arXiv
1812.06162).

A gradient of B rows is the true gradient G plus noise of variance tr(S) / B. The simple noise scale tr(S) / |G|^2 is
the batch size at which |G|^2 and the variance of the noise are equal. Far below this size, a step with twice the batch
makes almost twice the progress. Far above it, such a step makes the same progress and costs twice the work.

|G|^2 and tr(S) are estimated from a step of several micro-batches, on one rank or more, without an extra pass. w_m is
micro-batch m's share of the step's supervised tokens. g_m is its gradient, divided as in the sum of the step:

    E |sum of g_m|^2 = |G|^2 + tr(S) / rows            E sum of |g_m|^2 = Q |G|^2 + tr(S) / rows,  Q = sum of w_m^2

so |G|^2 = (|sum|^2 - sum of squares) / (1 - Q), and tr(S) / rows = (sum of squares - Q |sum|^2) / (1 - Q). With equal
micro-batches this is the paper's estimate from two batch sizes. A single step says little, and a mean of ratios would
be biased. So |G|^2 and tr(S) are each averaged over steps, and the noise scale is the ratio of these averages.

Cost: in each micro-batch, a hook computes the norm of each weight's gradient before autograd adds this gradient to the
sum. So no gradient is kept, and nothing waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from fxtune.data.batches.batch import IGNORE_INDEX
from fxtune.distributed.gradients import weak_hook

PARTS, SHARES, ROWS = NAMES = ("noise/parts", "noise/shares", "noise/rows")
"""Metrics of a step, summed over micro-batches and ranks: |g_m|^2, w_m^2, and the rows."""
DECAY = 0.98
"""The decay of the moving averages. They cover about 50 steps."""
LEAST_STEPS = 20
"""Number of steps after which the ratio is shown."""
NEAR = 2.0
"""A batch counts as near the noise scale within this factor."""


class MicroBatchNorms:
    """Computes the squared norm of each micro-batch's gradient with respect to `weights`."""

    def __init__(self, weights: Iterable[torch.Tensor]) -> None:
        self._squares: list[torch.Tensor] = []
        for weight in weights:
            weight.register_hook(weak_hook(self._arrived))

    def begin(self) -> None:
        """Call this before each backward pass."""
        self._squares.clear()

    def read(self, labels: torch.Tensor, rows: int, normalizer: torch.Tensor | float) -> dict[str, torch.Tensor]:
        """The metrics in NAMES of the micro-batch whose backward pass has ended, float32 scalars on the device.
        `normalizer`: the divisor of the loss; infinite: the micro-batch does not count. Does not wait for the device.
        """
        share = (labels != IGNORE_INDEX).sum() / normalizer
        zero = torch.zeros((), device=labels.device)
        squares = torch.stack(self._squares).sum() if self._squares else zero
        self._squares.clear()
        return {PARTS: squares, SHARES: share.square(), ROWS: torch.where(share > 0, float(rows), zero)}

    def _arrived(self, gradient: torch.Tensor) -> None:
        self._squares.append(torch.linalg.vector_norm(gradient.detach(), dtype=torch.float32).square())


class NoiseScale:
    """Moving averages of |G|^2 and tr(S) over the steps of a run, on the host. In the first steps both averages are
    too small by the same factor, so their ratio is right."""

    def __init__(self) -> None:
        self.signal = 0.0
        """The average of |G|^2."""
        self.noise = 0.0
        """The average of tr(S), the variance of the gradient of one row."""
        self.steps = 0

    def add(self, grad_norm: float, parts: float, shares: float, rows: float) -> None:
        """Count a step. `grad_norm`: before clipping; the other arguments: the step's metrics in NAMES. A step of one
        micro-batch is ignored, because it says nothing."""
        if not (shares < 1 - 1e-6 and math.isfinite(grad_norm) and math.isfinite(parts)):
            return
        whole = grad_norm**2
        self.steps += 1
        self.signal += (1 - DECAY) * ((whole - parts) / (1 - shares) - self.signal)
        self.noise += (1 - DECAY) * (rows * (parts - shares * whole) / (1 - shares) - self.noise)

    @property
    def rows(self) -> float | None:
        """The noise scale in rows, the unit of train.global_batch_size; None after too few steps, or if the gradients
        are almost only noise."""
        known = self.steps >= LEAST_STEPS and self.signal > 0 and self.noise > 0
        return self.noise / self.signal if known else None

    def state(self) -> list[float]:
        return [self.signal, self.noise, self.steps]

    def load(self, state: list[float]) -> None:
        """Restore what state() returned."""
        self.signal, self.noise = map(float, state[:2])
        self.steps = int(state[2])

    def advice(self, batch: int) -> str:
        """A sentence on a global batch of `batch` rows. By the paper, batches of n rows reach a loss after a number of
        steps proportional to 1 + noise scale / n, if each batch size has its best learning rate."""
        scale = self.rows
        if scale is None:
            why = (
                "gradients are almost noise alone" if self.steps >= LEAST_STEPS else f"{self.steps} steps are too few"
            )
            return f"The gradient noise scale is not known: {why}."
        found = f"The gradient noise scale is {scale:.3g} rows, by the last steps."
        other = batch
        while other * NEAR <= scale:
            other *= 2
        while other % 2 == 0 and other >= scale * NEAR:
            other //= 2
        if other == batch:
            near = scale / NEAR < batch < scale * NEAR
            return f"{found} train.global_batch_size={batch} is {'near it' if near else 'above it'}."
        steps = (1 + scale / other) / (1 + scale / batch)
        rows = steps * other / batch
        return (
            f"{found} By arXiv 1812.06162 a global batch of {other} in place of {batch} would take {_change(steps)} "
            f"steps and {_change(rows)} rows to the same loss, each at its best learning rate."
        )


def _change(ratio: float) -> str:
    return f"{abs(ratio - 1):.0%} {'fewer' if ratio < 1 else 'more'}"
