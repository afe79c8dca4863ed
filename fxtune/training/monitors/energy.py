"""Energy and cost of a run over all its processes and ranks, including start-up, evaluations, export and repeated
steps.

Rank 0 writes the energy used so far to RUN/energy.json at log lines, and a resumed run adds to it. So if a run is
killed, the energy of its lost steps is also counted, except for the last seconds. Figures of sensors that cannot be
read are left out.
"""

from __future__ import annotations

import math
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Optional

from fxtune.checkpoint.run_folder import RunFolder
from fxtune.distributed.ranks import process_rank
from fxtune.distributed.world import World
from fxtune.errors import StorageError
from fxtune.system.files.atomic_files import read_json
from fxtune.system.machine.energy import EnergyMeter, Reading
from fxtune.tracking.tracker import CostConfig

FILE = "energy.json"
LOGGED = ("energy/kwh", "energy/gpu_watts", "energy/gpu_utilization", "cost/total")
"""The names of the figures in a log line."""
WRITE_SECONDS = 10.0
"""Least seconds between two writes of the file at log lines."""


@dataclass
class Used:
    """Time and energy that a run, or one process of a run, has used. None: the value could not be read."""

    card_seconds: float = 0.0
    """Seconds of all processes; each process has one card."""
    gpu_joules: Optional[float] = None
    cpu_joules: Optional[float] = None
    gpu_seconds: float = 0.0
    """Card seconds for which the energy was read."""
    busy_seconds: Optional[float] = None
    """Card seconds in which a kernel ran."""

    @staticmethod
    def of(reading: Reading) -> Used:
        used, seconds = reading.gpu_utilization, reading.seconds
        return Used(
            seconds,
            reading.gpu_joules,
            reading.cpu_joules,
            seconds if reading.gpu_joules is not None else 0.0,
            None if used is None else used * seconds,
        )

    def plus(self, other: Used) -> Used:
        pairs = ((getattr(self, name), getattr(other, name)) for name in asdict(self))
        return Used(*(left if right is None else right if left is None else left + right for left, right in pairs))

    @property
    def joules(self) -> float | None:
        """Joules of cards and CPUs; None if neither was read."""
        readings = [joules for joules in (self.gpu_joules, self.cpu_joules) if joules is not None]
        return sum(readings) if readings else None

    @staticmethod
    def read(folder: Path) -> Used:
        """The time and energy that the run in `folder` has used so far; zeros if the file is missing or damaged."""
        with suppress(OSError, ValueError, TypeError, KeyError):
            values = {name: read_json(folder / FILE)["used"][name] for name in asdict(Used())}
            if all(value is None or (type(value) in (int, float) and value >= 0) for value in values.values()):
                return Used(**values)
        return Used()

    def figures(self, tokens: int, cost: CostConfig) -> dict[str, float]:
        """Figures for result.json and the trackers."""
        figures: dict[str, float | None] = {"energy/gpu_joules": self.gpu_joules, "energy/cpu_joules": self.cpu_joules}
        if (joules := self.joules) is not None:
            figures["energy/kwh"] = joules / 3.6e6
            figures["energy/joules_per_token"] = joules / tokens if tokens else None
        if self.gpu_joules is not None and self.gpu_seconds:
            figures["energy/gpu_watts"] = self.gpu_joules / self.gpu_seconds
        if self.busy_seconds is not None and self.card_seconds:
            figures["energy/gpu_utilization"] = min(self.busy_seconds / self.card_seconds, 1.0)
        if (price := cost.of(self.card_seconds, joules)) is not None:
            figures |= {"cost/total": price, "cost/per_million_tokens": price / tokens * 1e6 if tokens else None}
        return {name: value for name, value in figures.items() if value is not None}


class RunEnergy:
    """Measures the energy of the run in `folder` from its creation on."""

    def __init__(self, folder: RunFolder, world: World, cost: CostConfig) -> None:
        self.folder, self.world, self.cost = folder, world, cost
        self.before = Used.read(folder.path)
        """The time and energy of the run's earlier processes."""
        self.meter = EnergyMeter(world.device, hosts=process_rank().local_rank == 0)
        self._ranks: list[Used] = []
        """The time and energy of each rank since this process began, up to the last exchange of figures."""
        self._written, self._ended = time.monotonic(), False

    def own(self) -> list[float]:
        """The time and energy of this rank, for an exchange of numbers; NaN stands for None."""
        return [math.nan if value is None else value for value in asdict(Used.of(self.meter.read())).values()]

    def exchanged(self, ranks: list[list[float]]) -> None:
        """Keep what own() returned on each rank."""
        self._ranks = [Used(*(None if math.isnan(value) else value for value in rank)) for rank in ranks]  # type: ignore[arg-type]

    def used(self) -> Used:
        """The time and energy of all ranks and processes so far; with several ranks, up to their last exchange."""
        total = self.before
        for used in self._ranks if self.world.size > 1 else [Used.of(self.meter.read())]:
            total = total.plus(used)
        return total

    def log(self, tokens: int) -> dict[str, float]:
        """The figures so far. Writes the file if the last write was at least WRITE_SECONDS ago."""
        used = self.used()
        if time.monotonic() - self._written >= WRITE_SECONDS:
            self._write(used)
        figures = used.figures(tokens, self.cost)
        return {name: figures[name] for name in LOGGED if name in figures}

    def end(self, tokens: int) -> dict[str, float]:
        """Exchange and write the final figures, and return them. All ranks call this together."""
        if self.world.size > 1:
            self.exchanged(self.world.exchange(self.own(), "adding up the energy"))
        used = self.used()
        self._write(used)
        self._ended = True
        figures = used.figures(tokens, self.cost)
        for rank, own in enumerate(self._ranks if self.world.size > 1 else ()):
            of_rank = {**own.figures(0, CostConfig()), "energy/cpu_joules": None, "energy/kwh": None}
            figures |= {f"{name}_rank_{rank}": value for name, value in of_rank.items() if value is not None}
        return figures

    def close(self) -> None:
        """End the measurement. A run of one rank writes its use here, unless end() has written it. A complete run is
        never opened again, so a second write could only damage the file."""
        if self.world.size == 1 and not self._ended:
            self._write(self.used())
        self.meter.close()

    def _write(self, used: Used) -> None:
        self._written = time.monotonic()
        with suppress(StorageError):  # only a report is lost
            self.folder.write(FILE, {"used": asdict(used)})


def sentence(figures: dict[str, Any]) -> str:
    """A sentence for the user with the figures of a whole run; empty if there are no figures."""
    parts = []
    if (kwh := figures.get("energy/kwh")) is not None:
        cards = []
        if (watts := figures.get("energy/gpu_watts")) is not None:
            cards.append(f"{watts:,.0f} W a card")
        if (used := figures.get("energy/gpu_utilization")) is not None:
            cards.append(f"{used:.0%} of the time in use")
        if (cpu := figures.get("energy/cpu_joules")) is not None:
            cards.append(f"CPU {cpu / 3.6e6:.3g} kWh")
        parts.append(f"{kwh:.3g} kWh" + (f" ({', '.join(cards)})" if cards else ""))
        if (token := figures.get("energy/joules_per_token")) is not None:
            parts.append(f"{token:.3g} J a token")
    if (cost := figures.get("cost/total")) is not None:
        parts.append(f"cost {cost:.3g}")
    return "Energy: " + ", ".join(parts) if "energy/kwh" in figures else ", ".join(parts).capitalize()
