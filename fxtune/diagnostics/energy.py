"""Measures the energy that a GPU uses in a block of code, for `fxtune bench`.

There are two sources (fxtune/system/energy.py): the GPU's energy counter, read before and after the block; or, on a
GPU without one, its power, which a thread samples ten times a second and integrates. If the GPU has neither, there is
no figure, and `how` gives the reason.
"""

from __future__ import annotations

import threading
import time
from types import TracebackType

import torch

from fxtune.system.energy import Card, integrate

INTERVAL = 0.1
"""Seconds between two samples of the power. The driver itself averages over 25 to 100 ms."""


class Energy:
    """Joules of `device` inside the block: `with Energy(device) as energy: ...; energy.joules`. Raises nothing."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.joules: float | None = None
        """None: not measured."""
        self.how = ""
        """The source of the figure, or why there is none."""
        self._card: Card | None = None
        self._counter: float | None = None
        self._samples: list[tuple[float, float]] = []
        self._over = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Energy:
        self._card = card = Card(self.device)
        if card.missing:
            self.how = f"not measured: {card.missing}"
            return self
        self._counter = card.joules()
        if self._counter is not None:
            self.how = "the GPU's energy counter"
        elif card.watts() is not None:
            self.how = f"the GPU's power, sampled every {INTERVAL:g} s"
            self._sampler.start()
        else:
            self.how = "not measured: this GPU reports neither energy nor power"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._card
        if self._counter is not None:
            end = self._card.joules() or 0.0
            self.joules = end - self._counter if end > self._counter else None
        elif self._sampler.is_alive():
            self._over.set()
            self._sampler.join()
            self.joules = integrate(self._samples)
        if self.joules is None and not self.how.startswith("not measured"):
            self.how = f"not measured: {self.how} did not change"
        self._card.close()

    def _sample(self) -> None:
        assert self._card
        last, pause = False, 0.0
        while not last:
            last, pause = self._over.wait(pause), INTERVAL
            if (watts := self._card.watts()) is not None:
                self._samples.append((time.perf_counter(), watts))
