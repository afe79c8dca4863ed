"""Collects figures of all ranks: how long the parts of a step take, the slowest rank, the fullest card, the longest
wait for data.

Each replica times its forward and backward passes, in which it waits for no other replica. Ranks that share weights or
rows wait for each other in every layer, so all take equally long. The ranks agree on each step (agreement.py). In a
step with a log line, the message of this agreement also carries the figures. Steps that still run on a GPU at that
moment are counted at the next log line (step_timer.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import median
from typing import Any, TypeVar

import torch

from fxtune.distributed.world import World
from fxtune.system.terminal.units import GIB
from fxtune.tracking.throughput import memory_gib
from fxtune.training.monitors.energy import RunEnergy
from fxtune.training.monitors.step_timer import StepTimer

Result = TypeVar("Result")
PASSES, UPDATE = "forward_backward", "update"
"""The parts of a step that are timed."""


class RankReport:
    """Collects the figures of this rank. After agree() it has the figures of all ranks."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.timer = StepTimer(world.device)
        """The timer of this rank's forward and backward passes, and of its updates."""
        self._parts: dict[str, float] = {}
        """The timer's seconds of each part at the last exchange."""
        self.waited = 0.0
        """Seconds that this rank has waited for data since the last exchange."""
        self._all: list[list[float]] = []
        """For each rank: seconds of a step's passes, seconds waited for data, peak memory and peak reserved memory in
        GiB. Empty before the first exchange."""
        self.energy: RunEnergy | None = None
        """The energy of the run. Its figures travel in the same message."""

    def timed(self, work: Callable[[], Result]) -> Result:
        """Call work(), the forward and backward passes of a step, and time it."""
        with self.timer.part(PASSES):
            return work()

    def restart(self) -> None:
        """Forget the timings and waits of the steps so far."""
        self.waited = 0.0
        self.timer.restart()

    def agree(self, mine: int) -> int:
        """Agree as World.agree() does, and exchange the figures of all ranks in the same message."""
        own = self._own()
        used = self.energy.own() if self.energy else []
        ranks = self.world.exchange([float(mine), *own, *used], "deciding together")
        self._all = [figures[1 : 1 + len(own)] for figures in ranks]
        if self.energy:
            self.energy.exchanged([figures[1 + len(own) :] for figures in ranks])
        return int(max(verdict for verdict, *_ in ranks))

    def longest_wait(self) -> float | None:
        """The longest wait of a rank for data before the last exchange, in seconds; None without an exchange."""
        return max((waited for _, waited, _, _ in self._all), default=None)

    def figures(self) -> dict[str, Any]:
        """How long the parts of a step took, in seconds. With several ranks, the passes are the slowest rank's, and
        memory is the fullest card's."""
        parts = self._parts if self.world.size > 1 else self.timer.read()
        figures: dict[str, Any] = {f"train/{name}_seconds": seconds for name, seconds in parts.items()}
        if not self._all:
            return figures
        seconds, _, peaks, reserved = zip(*self._all, strict=True)
        figures["train/memory_gib"] = max(peaks)
        if max(reserved):
            figures["train/memory_reserved_gib"] = max(reserved)
        if (behind := slowest(seconds)) is not None:
            figures["train/slowest_rank"], figures["train/slowest_behind"] = behind
            figures[f"train/{PASSES}_seconds"] = max(seconds)
        return figures

    def _own(self) -> list[float]:
        self._parts = self.timer.read()
        shares = self.world.degrees.replicate < self.world.size  # all of them take as long as the slowest rank
        passes = math.nan if shares else self._parts.get(PASSES, math.nan)
        device = self.world.device
        reserved = torch.cuda.max_memory_reserved(device) / GIB if device.type == "cuda" else 0.0
        own = [passes, self.waited, memory_gib(device), reserved]
        self.waited = 0.0
        return own


def slowest(seconds: tuple[float, ...]) -> tuple[int, float] | None:
    """(the slowest rank, the share by which its steps take longer than the median of the other ranks); None if a
    rank's time is not known."""
    if len(seconds) < 2 or not all(value > 0 for value in seconds):
        return None
    rank = max(range(len(seconds)), key=seconds.__getitem__)
    others = median(value for index, value in enumerate(seconds) if index != rank)
    return rank, seconds[rank] / others - 1
