"""Reads the files and output of runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any


def history(folder: Path) -> list[dict]:
    """The lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> list[float]:
    return [line["train/loss"] for line in history(folder) if "train/loss" in line]


def train_once(shared: Path, train: Callable[[], Any], folder: Path = Path("run")) -> None:
    """Fill `folder` with a finished run. The first call for `shared`, a path that tests share, trains it by `train`;
    later calls copy it."""
    if shared.exists():
        shutil.copytree(shared, folder)
    else:
        train()
        shutil.copytree(folder, shared)
