"""The gradient noise scale: up to which size a larger global batch pays (McCandlish et al., arXiv 1812.06162).

A gradient of B rows is the true one, G, plus noise of variance tr(S) / B. The simple noise scale tr(S) / |G|^2 is the
batch at which |G|^2 and the noise are equal. Far below it, twice the batch makes almost twice the progress a step; far
above it, twice the batch makes the same progress a step, and costs twice as much.

|G|^2 and tr(S) are estimated from a step of several micro-batches, on one rank or more, without a further pass.
Micro-batch m has the share w_m of the step's supervised tokens, and its gradient, as the step sums it, is g_m:

    E |sum of g_m|^2 = |G|^2 + tr(S) / rows            E sum of |g_m|^2 = Q |G|^2 + tr(S) / rows,  Q = sum of w_m^2

so |G|^2 = (|sum|^2 - sum of squares) / (1 - Q), and tr(S) / rows = (sum of squares - Q |sum|^2) / (1 - Q). With equal
micro-batches this is the paper's estimate from two batch sizes. A single step says little, and a mean of ratios would
be biased, so the two are averaged over steps, and the noise scale is the ratio of the averages.

Cost: a norm of each weight's gradient in each micro-batch, computed by a hook before autograd adds the gradient up. So
no gradient is kept, and nothing waits for the device.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from fxtune.data.batches.batch import IGNORE_INDEX

PARTS, SHARES, ROWS = NAMES = ("noise/parts", "noise/shares", "noise/rows")
"""Metrics of a step: the sum of |g_m|^2, the sum of w_m^2, and the rows. Sums over micro-batches and ranks."""
DECAY = 0.98
"""The decay of the moving averages, which cover about 50 steps."""
LEAST_STEPS = 20
"""Steps after which the ratio is shown."""
NEAR = 2.0
"""A batch within this factor of the noise scale is near it."""


class MicroBatchNorms:
    """Squared norms of the gradient of each micro-batch of `weights`."""

    def __init__(self, weights: Iterable[torch.Tensor]) -> None:
        self._squares: list[torch.Tensor] = []
        # Through a weak reference, or the hooks of a model would fill the list of every step object that it had.
        arrived = weakref.WeakMethod(self._arrived)
        for weight in weights:
            weight.register_hook(lambda gradient: _call(arrived, gradient))

    def begin(self) -> None:
        """A backward pass follows."""
        self._squares.clear()

    def read(self, labels: torch.Tensor, rows: int, normalizer: torch.Tensor | float) -> dict[str, torch.Tensor]:
        """NAMES for the micro-batch whose backward pass is over, float32 scalars on the device. `normalizer`: what the
        loss is divided by; infinite: the micro-batch does not count. Does not wait for the device.
        """
        share = (labels != IGNORE_INDEX).sum() / normalizer
        zero = torch.zeros((), device=labels.device)
        squares = torch.stack(self._squares).sum() if self._squares else zero
        self._squares.clear()
        return {PARTS: squares, SHARES: share.square(), ROWS: torch.where(share > 0, float(rows), zero)}

    def _arrived(self, gradient: torch.Tensor) -> None:
        self._squares.append(torch.linalg.vector_norm(gradient.detach(), dtype=torch.float32).square())


def _call(arrived: weakref.WeakMethod[Any], gradient: torch.Tensor) -> None:
    """A hook of autograd."""
    if (method := arrived()) is not None:
        method(gradient)


class NoiseScale:
    """Moving averages over the steps of a run, on the host. In the first steps both are too small by the same factor,
    so their ratio is right."""

    def __init__(self) -> None:
        self.signal = 0.0
        """|G|^2"""
        self.noise = 0.0
        """tr(S), the variance of the gradient of one row."""
        self.steps = 0

    def add(self, grad_norm: float, parts: float, shares: float, rows: float) -> None:
        """Count a step by the norm of its gradient before clipping and NAMES. One micro-batch alone says nothing."""
        if not (shares < 1 - 1e-6 and math.isfinite(grad_norm) and math.isfinite(parts)):
            return
        whole = grad_norm**2
        self.steps += 1
        self.signal += (1 - DECAY) * ((whole - parts) / (1 - shares) - self.signal)
        self.noise += (1 - DECAY) * (rows * (parts - shares * whole) / (1 - shares) - self.noise)

    @property
    def rows(self) -> float | None:
        """The noise scale in rows, the unit of train.global_batch_size; None after too few steps, or if the gradients
        are almost noise alone."""
        known = self.steps >= LEAST_STEPS and self.signal > 0 and self.noise > 0
        return self.noise / self.signal if known else None

    def state(self) -> list[float]:
        return [self.signal, self.noise, self.steps]

    def load(self, state: list[float]) -> None:
        """Restore what state() returned."""
        self.signal, self.noise = map(float, state[:2])
        self.steps = int(state[2])

    def advice(self, batch: int) -> str:
        """A sentence on a global batch of `batch` rows. By the paper, n rows reach a loss in steps proportional to
        1 + noise scale / n, each at its best learning rate."""
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
