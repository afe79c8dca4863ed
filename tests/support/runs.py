"""Reads the files and output of runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SUPPORT = Path(__file__).resolve().parent


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


def interpreted(script: Path) -> list[str]:
    """Run a script of Triton kernels in Triton's interpreter. Returns the words that it prints.

    The interpreter must be chosen before triton is imported, so the script runs in its own process.
    """
    pytest.importorskip("triton")
    run = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout.split()
