"""Finds the model or adapter that a run has written, for the commands that take a RUN."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fxtune.checkpoint.run_folder import CHECKPOINTS, read_config
from fxtune.errors import ConfigError, did_you_mean

RUNS = Path("runs")
ADAPTER_FILE = "adapter_config.json"


@dataclass(frozen=True)
class RunOutput:
    folder: Path
    """The folder of the adapter or of the whole model."""
    is_adapter: bool
    config: dict[str, Any]
    """The run's config as plain data; empty for a folder that is not in a run."""


def find_output(run: str) -> RunOutput:
    """The output of a run: its folder, its name (the newest of runs/NAME, runs/NAME-2, ...), or an adapter's or a
    model's folder. Raises ConfigError, or StorageError for a config that cannot be read."""
    folder = run_folder(run)
    for found in (folder / "adapter", folder / "model", folder):
        if (found / ADAPTER_FILE).is_file():
            return RunOutput(found, True, read_config(folder) or read_config(folder.parent) or {})
        if (found / "config.json").is_file():
            return RunOutput(found, False, read_config(folder) or read_config(folder.parent) or {})
    if (folder / "config.yaml").exists():
        raise ConfigError(
            f"{folder} has no adapter and no model yet: the training has not finished. Give its command again; it "
            "continues."
        )
    if folder.parent.name == CHECKPOINTS:
        raise ConfigError(
            f"{folder} is a checkpoint. Write its model first, and name that: fxtune merge {folder} FOLDER"
        )
    raise ConfigError(f"{folder} is no run, adapter or model of fxtune: it holds no config.yaml and no config.json.")


def run_folder(run: str) -> Path:
    """The folder `run`, or the newest of runs/NAME, runs/NAME-2 and so on. Raises ConfigError if there is none."""
    if Path(run).expanduser().is_dir():
        return Path(run).expanduser()
    named = [folder for folder in RUNS.glob("*") if folder.is_dir() and is_run(folder.name, run)]
    if named:
        return max(named, key=lambda folder: folder.stat().st_mtime)
    known = [folder.name for folder in sorted(RUNS.glob("*")) if folder.is_dir()]
    raise ConfigError(f"there is no run `{run}` (looked for ./{run} and runs/{run}){did_you_mean(run, known)}")


def is_run(name: str, root: str) -> bool:
    """Whether a folder is a run of the recipe `root`: NAME, NAME-2, NAME-3, ..."""
    number = name.removeprefix(root)
    return name.startswith(root) and (not number or (number.startswith("-") and number[1:].isdigit()))
