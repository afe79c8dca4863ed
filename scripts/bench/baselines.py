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
import sys
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

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
    """Of SHAPES in ablate.py or, with images, in image_documents.py."""
    rows: int | None = None
    """Rows of a micro-batch of one card."""
    length: int | None = None
    """Tokens of a row."""
    packed: bool = False
    """Whether rows hold several documents of other lengths, whose attention costs less."""
    tokens_per_second: float | None = None
    """Tokens of documents, of all cards."""
    step_ms: float | None = None
    """Median time of a step."""
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
    error: str = ""
    """Why there are no figures: `does not fit`."""


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
    measurements = [Measurement(**row) for row in values.pop("measurements")]
    return Baseline(measurements=measurements, **values)


def read_all(folder: Path | None = None) -> list[Baseline]:
    """All files, the oldest first."""
    names = sorted(path.stem for path in (folder or FOLDER).glob("*.json"))
    return sorted((read(name, folder) for name in names), key=lambda baseline: baseline.date)


def write(name: str, baseline: Baseline, folder: Path | None = None) -> Path:
    """Write `baseline` without the fields that have their default, and return the path."""
    head = {key: value for key, value in _given(baseline).items() if key != "measurements"}
    rows = ",\n".join(f"  {json.dumps(_given(row))}" for row in baseline.measurements)
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


def card() -> str:
    """The name of this machine's card in `fxtune plan --gpu`, else what torch calls it; without a card the processor."""
    import torch

    from fxtune.estimate.machines import CARD_MODELS

    if not torch.cuda.is_available():
        return platform.processor() or platform.machine()
    device = torch.cuda.get_device_name()
    return next((name for name, model in CARD_MODELS.items() if model.device_name == device), device)


def today() -> str:
    return datetime.date.today().isoformat()


def versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
