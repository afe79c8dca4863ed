"""Measures how long the parts of a step take: forward and backward passes, and the update of the weights.

On a GPU, events on its stream time the parts. Nothing waits for these events. Parts that have not finished are counted
at the next read.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class StepTimer:
    """Times parts of steps on `device`, by name."""

    def __init__(self, device: torch.device) -> None:
        self._gpu = device.type == "cuda"
        self._running: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()
        """Name, begin event and end event of each part that the device may not have finished."""
        self._done: dict[str, tuple[int, float]] = {}
        """For each name: (how often the part ran since the last read, its seconds in total)."""

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A context whose body is timed as the part `name` of a step. A body that raises an error is not counted."""
        if not self._gpu:
            began = time.perf_counter()
            yield
            self._count(name, time.perf_counter() - began)
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        self._running.append((name, begin, end))
        self._collect()

    def read(self) -> dict[str, float]:
        """Mean seconds of each part since the last read. Parts that have not finished are left out."""
        self._collect()
        done, self._done = self._done, {}
        return {name: seconds / times for name, (times, seconds) in done.items()}

    def restart(self) -> None:
        """Forget the timings of the steps so far."""
        self._running.clear()
        self._done.clear()

    def _collect(self) -> None:
        while self._running and self._running[0][2].query():
            name, begin, end = self._running.popleft()
            self._count(name, begin.elapsed_time(end) / 1e3)

    def _count(self, name: str, seconds: float) -> None:
        times, sum_ = self._done.get(name, (0, 0.0))
        self._done[name] = (times + 1, sum_ + seconds)
