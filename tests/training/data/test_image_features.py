"""Features of images in each step and stored, by the public command: the same losses, and never a stale file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from support.cases import slow_but
from support.killing import Reference
from support.processors import FAMILIES, write_model, write_picture_rows
from support.runs import exported, figures, same_export

from fxtune.cli.main import main
from fxtune.errors import ConfigError

WORDS = [
    "model.path=model",
    "data.sources=[{path: pictures/rows.jsonl}]",
    "data.sequence_length=256",
    "data.cache_dir=cache",
    "data.eval_fraction=0.2",
    "techniques.lora.enabled=true",
    "train.micro_batch_size=1",
    "train.global_batch_size=2",
    "train.epochs=2",
    "optimizer.lr=1e-2",
    "tracking.display=plain",
    "run.report=false",
    "run.device=cpu",
]


def train(run: str, *words: str) -> list[tuple[float, ...]]:
    """The losses and gradient norms of a run."""
    assert main([*WORDS, f"run.dir={run}", *words]) == 0
    return figures(run, "loss", "grad_norm")


def stored() -> list[Path]:
    return sorted(Path("cache").rglob("image_features-*.npy"))


@pytest.mark.parametrize("family", FAMILIES)
def test_two_epochs_are_those_of_computed_features(family, cwd):
    write_model(family, Path("model"))
    write_picture_rows(Path("pictures"))
    steps = [train(run, f"data.image_features={run}") for run in ("computed", "stored")]
    assert len(steps[0]) > 4
    for mine, theirs in zip(*steps, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-6)
    print(family, steps[0] == steps[1], same_export("computed", "stored"))
