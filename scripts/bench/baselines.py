"""The measured figures of benchmarks/baselines/*.json: what a file holds, how it is read and written.

A file is what one command measured on one machine. The scripts of this folder write it with `--baseline NAME`, and
scripts/make/baseline_tables.py makes the tables of README.md and docs/ from it. A figure that was not measured is absent.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from shapes import HEADS_OF_64

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmarks" / "baselines"
PACKAGES = (
    "fxtune",
    "torch",
    "transformers",
    "peft",
    "triton",
    "flash-attn-4",
    "quack-kernels",
    "liger-kernel",
    "trl",
    "sentence-transformers",
    "unsloth",
)
"""Packages whose versions a file names."""
OLD_DAYS = 60
"""A row that is older is marked in tables."""
SHARED = ("date", "card", "versions")
"""Fields that rows take from their file."""


@dataclass(frozen=True)
class Measurement:
    """One row of a table. None: not measured."""

    case: str
    tool: str = "fxtune"
    settings: str = ""
    """What differs from the case's own settings, in words."""
    keys: list[str] | None = None
    """fxtune's keys, if they were recorded; scripts/study/plan_accuracy.py compares such rows with the forecast."""
    shape: str | None = None
    """Of SHAPES in shapes.py."""
    rows: int | None = None
    """Rows of a micro-batch of one card."""
    length: int | None = None
    """Tokens of a row."""
    packed: bool = False
    """Whether rows hold several documents of other lengths, whose attention costs less."""
    tokens_per_second: float | None = None
    """Tokens of documents, of all cards."""
    step_ms: float | None = None
    """Median time of a step (p50)."""
    step_ms_p5: float | None = None
    step_ms_p95: float | None = None
    memory_gib: float | None = None
    """Peak of torch's allocator on the fullest card."""
    reserved_gib: float | None = None
    """Peak of the memory that the allocator has taken from the device."""
    forecast_gib: float | None = None
    host_gib: float | None = None
    """Pinned host memory."""
    seconds_to_first_step: float | None = None
    """From the command to the end of the first step."""
    seconds_to_second_step: float | None = None
    startup_seconds: dict[str, float] | None = None
    """seconds_to_second_step by part."""
    joules_per_token: float | None = None
    base_tokens_per_second: float | None = None
    """Speed of the run that this row is compared with, if that run is not in the file."""
    cards: int | None = None
    """Cards of this row, where the rows of a file have different numbers of cards."""
    exchange_share: float | None = None
    """Share of a step in which the first card only exchanges with the others, 0 to 1."""
    clock_mhz: int | None = None
    """Median clock of the cards' multiprocessors while they were busy."""
    error: str = ""
    """Why there are no figures: `does not fit`."""
    date: str = ""
    card: str = ""
    versions: dict[str, str] | None = None
    """These three are written only where they differ from the file's."""

    def marks(self, day: str) -> list[str]:
        """What a reader of a table must know of this row on `day`: another shape than today's, or its age."""
        age = datetime.date.fromisoformat(day) - datetime.date.fromisoformat(self.date or day)
        old = f"measured on {self.date}" if age.days > OLD_DAYS else ""
        return [mark for mark in ("heads of 64" * (self.shape or "").endswith(HEADS_OF_64), old) if mark]


@dataclass(frozen=True)
class Baseline:
    command: str
    card: str
    """Its name in `fxtune plan --gpu`, or the name of the processor."""
    date: str
    measurements: list[Measurement]
    cards: int = 1
    versions: dict[str, str] = field(default_factory=dict)
    note: str = ""


def read(name: str, folder: Path | None = None) -> Baseline:
    values = json.loads(((folder or FOLDER) / f"{name}.json").read_text())
    shared = {name: values[name] for name in SHARED if name in values}
    measurements = [Measurement(**{**shared, **row}) for row in values.pop("measurements")]
    return Baseline(measurements=measurements, **values)


def read_all(folder: Path | None = None) -> list[Baseline]:
    """All files, the oldest first; of one day, NAME after NAME_first."""
    names = sorted((path.stem for path in (folder or FOLDER).glob("*.json")), reverse=True)
    return sorted((read(name, folder) for name in names), key=lambda baseline: baseline.date)


def write(name: str, baseline: Baseline, folder: Path | None = None) -> Path:
    """Write `baseline` without the fields that have their default, and return the path."""
    head = {key: value for key, value in _given(baseline).items() if key != "measurements"}
    own = [
        {k: v for k, v in _given(row).items() if k not in SHARED or v != head.get(k)} for row in baseline.measurements
    ]
    rows = ",\n".join(f"  {json.dumps(row)}" for row in own)
    body = "".join(f" {json.dumps(key)}: {json.dumps(value)},\n" for key, value in head.items())
    path = (folder or FOLDER) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{{\n{body} "measurements": [\n{rows}\n ]\n}}\n')
    return path


def _given(value: Any) -> dict[str, Any]:
    usual = {
        item.name: item.default if item.default_factory is MISSING else item.default_factory()
        for item in fields(value)
    }
    return {name: found for name, found in asdict(value).items() if found != usual[name]}


def add_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--baseline", metavar="NAME", help="also write the figures to benchmarks/baselines/NAME.json")


def save(name: str | None, measurements: Sequence[Measurement], cards: int = 1) -> None:
    """Write what this process's command has measured on this machine. None: write nothing."""
    if name and measurements:
        print(f"Written: {write(name, Baseline(command(), card(), today(), list(measurements), cards, versions()))}")


def command() -> str:
    """The command of this process, as a user types it in the root of the repository."""
    script = Path(sys.argv[0]).resolve()
    return shlex.join(
        ["python", str(script.relative_to(ROOT) if script.is_relative_to(ROOT) else script), *sys.argv[1:]]
    )


def card(device: str | None = None) -> str:
    """The name in `fxtune plan --gpu` of a card, else what torch calls it; without a card the processor. `device`:
    torch's name; None: of this machine's card."""
    import torch

    from fxtune.estimate.machines import CARD_MODELS

    device = device or (torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu")
    if device == "cpu":
        return platform.processor() or platform.machine()
    return next((name for name, model in CARD_MODELS.items() if model.device_name == device), device)


def today() -> str:
    return datetime.date.today().isoformat()


def versions() -> dict[str, str]:
    """Of the packages of this process, and of the driver."""
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    driver = nvidia_smi("driver_version")
    return {**found, **({"driver": driver[0][0]} if driver else {})}


def nvidia_smi(fields: str) -> list[list[str]]:
    """The values of these fields for each card; empty without a card."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return []
    return [line.split(", ") for line in lines]


@contextlib.contextmanager
def circumstances(cards: str) -> Iterator[dict[str, Any]]:
    """What a row says of its measurement: `date`, `versions` and, at the end, `clock_mhz`: the clock of the cards' multiprocessors,
    read twice a second, the median while they were busy. `cards`: as CUDA_VISIBLE_DEVICES has them."""
    found: dict[str, Any] = dict(date=today(), versions=versions())
    query = ["--query-gpu=clocks.sm,utilization.gpu", "--format=csv,noheader,nounits"]
    with tempfile.TemporaryFile("w+") as lines, contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # no card
            reading = stack.enter_context(
                subprocess.Popen(["nvidia-smi", "-i", cards, *query, "-lms", "500"], stdout=lines)
            )
            stack.callback(reading.terminate)
        yield found
        stack.close()
        lines.seek(0)
        pairs = (line.strip().split(", ") for line in lines)
        if busy := [
            int(each[0]) for each in pairs if len(each) == 2 and all(map(str.isdigit, each)) and int(each[1]) > 90
        ]:
            found["clock_mhz"] = round(statistics.median(busy))
