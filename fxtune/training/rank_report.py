"""Figures of all ranks: the rank that is slower than the others, the fullest card, the longest wait for data.

Each replica times its own forward and backward passes, which wait for no other rank: on a GPU by events on its stream,
which nobody waits for. (Ranks that share weights or rows wait for each other in every layer, so all take as long.) The
ranks agree on each step anyway (agreement.py). At the steps that end in a log line they exchange these figures in the
same message, so it costs no further one. On a GPU the last steps may still be running then, and are counted at the
next log line.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from statistics import median
from typing import Any, TypeVar

import torch

from fxtune.distributed.world import World
from fxtune.system.units import GIB
from fxtune.tracking.throughput import memory_gib
from fxtune.training.run_energy import RunEnergy

Result = TypeVar("Result")


class RankReport:
    """Collects the figures of this rank, and after agree() has those of all ranks."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.steps = 0
        """Steps whose passes are timed in `seconds`."""
        self.seconds = 0.0
        self.waited = 0.0
        """Seconds that this rank has waited for data since the last exchange."""
        self._running: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        """Beginning and end of the passes that the device may not have finished."""
        self._all: list[list[float]] = []
        """Seconds of a step's passes, seconds waited for data, peak memory and peak reserved memory in GiB, of each
        rank. Empty before the first exchange."""
        self.energy: RunEnergy | None = None
        """Its figures travel in the same message."""

    def timed(self, work: Callable[[], Result]) -> Result:
        """work(), the forward and backward passes of a step."""
        if self.world.size == 1 or self.world.degrees.replicate < self.world.size:
            return work()
        if self.world.device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            result = work()
            end.record()
            self._running.append((begin, end))
            return result
        began = time.perf_counter()
        result = work()
        self._count(time.perf_counter() - began)
        return result

    def restart(self) -> None:
        """Forget the steps so far."""
        self.steps, self.seconds, self.waited = 0, 0.0, 0.0
        self._running.clear()

    def agree(self, mine: int) -> int:
        """World.agree(), with the figures of each rank in the same message."""
        own = self._own()
        used = self.energy.own() if self.energy else []
        found = self.world.exchange([float(mine), *own, *used], "deciding together")
        self._all = [figures[1 : 1 + len(own)] for figures in found]
        if self.energy:
            self.energy.exchanged([figures[1 + len(own) :] for figures in found])
        return int(max(verdict for verdict, *_ in found))

    def longest_wait(self) -> float | None:
        """Seconds that one rank waited for data before the last exchange; None without one."""
        return max((waited for _, waited, _, _ in self._all), default=None)

    def figures(self) -> dict[str, Any]:
        """What the log line of several ranks has beside that of one, or in place of figures of rank 0 alone."""
        if not self._all:
            return {}
        seconds, _, peaks, reserved = zip(*self._all, strict=True)
        figures: dict[str, Any] = {"train/memory_gib": max(peaks)}
        if max(reserved):
            figures["train/memory_reserved_gib"] = max(reserved)
        if (found := slowest(seconds)) is not None:
            figures["train/slowest_rank"], figures["train/slowest_behind"] = found
        return figures

    def _own(self) -> list[float]:
        while self._running and self._running[0][1].query():
            begin, end = self._running.pop(0)
            self._count(begin.elapsed_time(end) / 1e3)
        device = self.world.device
        reserved = torch.cuda.max_memory_reserved(device) / GIB if device.type == "cuda" else 0.0
        own = [self.seconds / self.steps if self.steps else math.nan, self.waited, memory_gib(device), reserved]
        self.steps, self.seconds, self.waited = 0, 0.0, 0.0
        return own

    def _count(self, seconds: float) -> None:
        self.steps += 1
        self.seconds += seconds


def slowest(seconds: tuple[float, ...]) -> tuple[int, float] | None:
    """The slowest rank, and by what share its steps take longer than the median of the others; None: not known."""
    if len(seconds) < 2 or not all(value > 0 for value in seconds):
        return None
    rank = max(range(len(seconds)), key=seconds.__getitem__)
    others = median(value for index, value in enumerate(seconds) if index != rank)
    return rank, seconds[rank] / others - 1
