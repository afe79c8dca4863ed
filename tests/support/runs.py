"""Reads the files and output of runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file


def history(folder: Path) -> list[dict]:
    """The lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> list[float]:
    return [line["train/loss"] for line in history(folder) if "train/loss" in line]


def figures(run: str | Path, *names: str) -> list[tuple[float, ...]]:
    """The figures train/NAME of each logged step."""
    lines = [line for line in history(Path(run)) if "train/loss" in line]
    return [tuple(line[f"train/{name}"] for name in names) for line in lines]


def exported(run: str | Path) -> dict[str, torch.Tensor]:
    """The weights that a run exported: the adapter, or the model of full fine-tuning."""
    (file,) = (file for name in ("adapter", "model") for file in Path(run, name).glob("*model.safetensors"))
    return load_file(file)


def same_export(one: str | Path, other: str | Path) -> bool:
    """Whether two runs exported the same bits."""
    left, right = exported(one), exported(other)
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def train_once(shared: Path, train: Callable[[], Any], folder: Path = Path("run")) -> None:
    """Fill `folder` with a finished run. The first call for `shared`, a path that tests share, trains it by `train`;
    later calls copy it."""
    if shared.exists():
        shutil.copytree(shared, folder)
    else:
        train()
        shutil.copytree(folder, shared)
