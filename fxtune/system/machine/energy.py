"""Energy, power and utilisation of a GPU (NVML) and of the host's CPUs (RAPL), where they can be read.

- GPU: NVML's energy counter (millijoules since the driver was loaded; Volta and newer), or its power, integrated by
  trapezoids. Both include memory, fans, and other processes on the GPU.
- CPU: the counters of Linux in /sys/class/powercap (microjoules of each processor package and its memory, Intel and
  AMD). Most systems let only root read them. All processes of the host are included.

Nothing is estimated.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

from fxtune.system.machine.nvml import Card

RAPL = Path("/sys/class/powercap")
INTERVAL = 1.0
"""Seconds between two samples of EnergyMeter. A sample takes less than a millisecond."""


class Processors:
    """The RAPL counters of this host."""

    def __init__(self, folder: Path | None = None) -> None:
        self._zones: list[tuple[Path, int, int]] = []
        """(file, count at which the counter wraps, last count) of each counter. Counts are in microjoules."""
        self._joules = 0.0
        for zone in sorted((folder or RAPL).glob("intel-rapl:*")):
            try:
                name = (zone / "name").read_text().strip()
                if not name.startswith("package") and name != "dram":
                    continue  # cores are a part of their package, and psys has all packages in it
                wraps = int((zone / "max_energy_range_uj").read_text())
                self._zones.append((zone / "energy_uj", wraps, int((zone / "energy_uj").read_text())))
            except (OSError, ValueError):
                continue

    def joules(self) -> float | None:
        """Joules since this object was made; None if no counter can be read. Call it before a counter wraps twice."""
        if not self._zones:
            return None
        zones = []
        for file, wraps, before in self._zones:
            try:
                now = int(file.read_text())
            except (OSError, ValueError):
                continue
            self._joules += ((now - before) if now >= before else (now - before + wraps)) / 1e6
            zones.append((file, wraps, now))
        self._zones = zones
        return self._joules


@dataclass(frozen=True)
class Reading:
    """What an EnergyMeter has measured since it was made. A figure of None cannot be read."""

    seconds: float = 0.0
    gpu_joules: float | None = None
    gpu_utilization: float | None = None
    """Mean share of the time in which a kernel ran, 0 to 1."""
    cpu_joules: float | None = None


class EnergyMeter:
    """Measures from its creation on. start() begins a thread that takes a sample each INTERVAL, if anything can be
    sampled. `hosts`: whether this process measures the CPUs of its host."""

    def __init__(self, device: torch.device, hosts: bool = True, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._began = clock, clock()
        self._card = Card(device)
        self._processors = Processors() if hosts else None
        self._counter = self._card.joules()
        self._power: list[tuple[float, float]] = []
        """The last sample of the power, if the card has no counter."""
        self._joules = 0.0
        self._used, self._samples = 0.0, 0
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._sampled = self._sample()

    def start(self) -> None:
        """Begin to sample. The GPU's power and utilisation need samples. So do the CPU counters, because they wrap."""
        if self._sampled and self._thread is None:
            self._thread = threading.Thread(target=self._repeat, name="fxtune-energy", daemon=True)
            self._thread.start()

    def read(self) -> Reading:
        with self._lock:
            self._sample()
            gpu: float | None = self._joules if self._power else None
            if self._counter is not None and (now := self._card.joules()) is not None:
                gpu = max(now - self._counter, 0.0)
            return Reading(
                self._clock() - self._began,
                gpu or None,
                self._used / self._samples if self._samples else None,
                (self._processors.joules() if self._processors else None) or None,
            )

    @property
    def source(self) -> str:
        """Where the card's joules come from, or "not measured" and the reason."""
        if self._card.missing:
            return f"not measured: {self._card.missing}"
        if self._counter is None and not self._power:
            return "not measured: this GPU reports neither energy nor power"
        found = "the GPU's energy counter" if self._counter is not None else f"the GPU's power, each {INTERVAL:g} s"
        return found if self.read().gpu_joules else f"not measured: {found} did not change"

    def close(self) -> None:
        """End the thread. Safe to call twice."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._card.close()

    def _repeat(self) -> None:
        while not self._over.wait(INTERVAL):
            with self._lock:
                self._sample()

    def _sample(self) -> bool:
        """Read the figures that are sampled. Returns whether any figure could be read."""
        found = False
        if (used := self._card.utilization()) is not None:
            self._used, self._samples = self._used + used, self._samples + 1
            found = True
        if self._counter is None and (watts := self._card.watts()) is not None:
            self._power.append((self._clock(), watts))
            self._joules += integrate(self._power) or 0.0
            self._power = self._power[-1:]
            found = True
        if self._processors is not None and self._processors.joules() is not None:
            found = True
        return found


def integrate(samples: Sequence[tuple[float, float]]) -> float | None:
    """Joules from samples (seconds, watts), by trapezoids; None for fewer than two samples, or without any power."""
    joules = sum((after - before) * (low + high) / 2 for (before, low), (after, high) in pairwise(samples))
    return joules or None
