"""Energy and cost of a run: of all its processes and ranks, start-up, evaluations, export and repeated steps included.

What was used so far is in RUN/energy.json, which rank 0 writes at log lines. A resumed run adds to it, so steps that a
kill has lost are counted, too, except for the last seconds. Where nothing can be read, there is no figure.
"""

from __future__ import annotations

import math
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Optional

from fxtune.checkpoint.run_folder import RunFolder
from fxtune.distributed.ranks import place
from fxtune.distributed.world import World
from fxtune.errors import StorageError
from fxtune.system.atomic_files import read_json
from fxtune.system.energy import EnergyMeter, Reading
from fxtune.tracking.cost import CostConfig

FILE = "energy.json"
LOGGED = ("energy/kwh", "energy/gpu_watts", "energy/gpu_utilization", "cost/total")
"""The figures that a log line has."""
WRITE_SECONDS = 10.0
"""Seconds between two writes of the file."""


@dataclass
class Used:
    """What a run, or one process of it, has used. None: it could not be read."""

    card_seconds: float = 0.0
    """Seconds of processes; each has a card."""
    gpu_joules: Optional[float] = None
    cpu_joules: Optional[float] = None
    gpu_seconds: float = 0.0
    """Card seconds with an energy reading."""
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
        return Used(*(one if two is None else two if one is None else one + two for one, two in pairs))

    @property
    def joules(self) -> float | None:
        """Joules of cards and CPUs; None if neither was read."""
        known = [value for value in (self.gpu_joules, self.cpu_joules) if value is not None]
        return sum(known) if known else None

    @staticmethod
    def read(folder: Path) -> Used:
        """What the run in `folder` has used. A file that is missing or damaged counts as nothing used."""
        with suppress(OSError, ValueError, TypeError, KeyError):
            found = {name: read_json(folder / FILE)["used"][name] for name in asdict(Used())}
            if all(value is None or (type(value) in (int, float) and value >= 0) for value in found.values()):
                return Used(**found)
        return Used()

    def figures(self, tokens: int, cost: CostConfig) -> dict[str, float]:
        """What result.json and the trackers show."""
        found: dict[str, float | None] = {"energy/gpu_joules": self.gpu_joules, "energy/cpu_joules": self.cpu_joules}
        if (joules := self.joules) is not None:
            found["energy/kwh"] = joules / 3.6e6
            found["energy/joules_per_token"] = joules / tokens if tokens else None
        if self.gpu_joules is not None and self.gpu_seconds:
            found["energy/gpu_watts"] = self.gpu_joules / self.gpu_seconds
        if self.busy_seconds is not None and self.card_seconds:
            found["energy/gpu_utilization"] = min(self.busy_seconds / self.card_seconds, 1.0)
        if (price := cost.of(self.card_seconds, joules)) is not None:
            found |= {"cost/total": price, "cost/per_million_tokens": price / tokens * 1e6 if tokens else None}
        return {name: value for name, value in found.items() if value is not None}


class RunEnergy:
    """Measures the run in `folder` from now on."""

    def __init__(self, folder: RunFolder, world: World, cost: CostConfig) -> None:
        self.folder, self.world, self.cost = folder, world, cost
        self.before = Used.read(folder.path)
        """What earlier processes of the run used."""
        self.meter = EnergyMeter(world.device, hosts=place()[2] == 0)
        self._ranks: list[Used] = []
        """What each rank has used since this process began, up to the last exchange of figures."""
        self._written, self._ended = time.monotonic(), False

    def own(self) -> list[float]:
        """What this rank has used, for an exchange of numbers; NaN for what cannot be read."""
        return [math.nan if value is None else value for value in asdict(Used.of(self.meter.read())).values()]

    def exchanged(self, ranks: list[list[float]]) -> None:
        """Take own() of every rank."""
        self._ranks = [Used(*(None if math.isnan(value) else value for value in rank)) for rank in ranks]  # type: ignore[arg-type]

    def used(self) -> Used:
        """All ranks and processes so far; of several ranks, at their last exchange."""
        total = self.before
        for one in self._ranks if self.world.size > 1 else [Used.of(self.meter.read())]:
            total = total.plus(one)
        return total

    def log(self, tokens: int) -> dict[str, float]:
        """The figures so far. Writes the file if that was a while ago."""
        used = self.used()
        if time.monotonic() - self._written >= WRITE_SECONDS:
            self._write(used)
        figures = used.figures(tokens, self.cost)
        return {name: figures[name] for name in LOGGED if name in figures}

    def end(self, tokens: int) -> dict[str, float]:
        """The figures of the run up to now, exchanged and written. All ranks call this together."""
        if self.world.size > 1:
            self.exchanged(self.world.exchange(self.own(), "adding up the energy"))
        used = self.used()
        self._write(used)
        self._ended = True
        figures = used.figures(tokens, self.cost)
        for rank, one in enumerate(self._ranks if self.world.size > 1 else ()):
            mine = {**one.figures(0, CostConfig()), "energy/cpu_joules": None, "energy/kwh": None}
            figures |= {f"{name}_rank_{rank}": value for name, value in mine.items() if value is not None}
        return figures

    def close(self) -> None:
        """End the measurement. Write what one process has used up to now, unless end() has: a run that is complete is
        not opened again, so a kill would leave a half-written file in it."""
        if self.world.size == 1 and not self._ended:
            self._write(self.used())
        self.meter.close()

    def _write(self, used: Used) -> None:
        self._written = time.monotonic()
        with suppress(StorageError):  # only a report is lost
            self.folder.write(FILE, {"used": asdict(used)})


def sentence(figures: dict[str, Any]) -> str:
    """The figures of a whole run for people; empty if there are none."""
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
