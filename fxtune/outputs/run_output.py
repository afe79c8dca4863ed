"""Finds what a word of a command line means: a run, a checkpoint of a run, an adapter or a model.

    quickstart                               # the newest run of a name: runs/quickstart, runs/quickstart-2, ...
    runs/quickstart-2                        # the folder of a run
    quickstart/step-87                       # a checkpoint, with or without leading zeros
    runs/quickstart/checkpoints/step-87
    quickstart/adapter, downloads/lamps      # the folder of an adapter or of a model

Every command with such a word calls this module.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from fxtune.checkpoint import folder as stored
from fxtune.checkpoint.run_folder import ABOUT, CHECKPOINTS, RUNS, holds_run, read_config
from fxtune.config import discovery
from fxtune.errors import ConfigError, did_you_mean
from fxtune.system.files.atomic_files import json_or_empty

ADAPTER_FILE = "adapter_config.json"
STEP = re.compile(r"step-(\d+)")


class OutputKind(str, Enum):
    checkpoint = "checkpoint"
    adapter = "adapter"
    model = "model"


@dataclass(frozen=True)
class RunOutput:
    folder: Path
    """The folder of the checkpoint, of the adapter or of the whole model."""
    kind: OutputKind
    run: Path | None
    """The folder of the run that wrote the output; None if the output lies in no run."""

    @property
    def config(self) -> dict[str, Any]:
        """The run's config as plain data; empty without a run. Raises StorageError if it cannot be read."""
        return (read_config(self.run) if self.run else None) or {}

    def about(self, key: str) -> Any:
        """An entry of the run's about.json; None if there is none."""
        return json_or_empty(self.run / ABOUT).get(key) if self.run else None


def find_output(name: str) -> RunOutput:
    """The checkpoint, adapter or model that `name` means. For a run: the run's export. Raises ConfigError."""
    folder = find_folder(name)
    if folder is None:
        raise unknown(name)
    if is_checkpoint(folder):
        return RunOutput(folder, OutputKind.checkpoint, _run_of(folder))
    for found in (folder / "adapter", folder / "model", folder):
        for file, kind in ((ADAPTER_FILE, OutputKind.adapter), ("config.json", OutputKind.model)):
            if (found / file).exists():
                return RunOutput(found, kind, _run_of(found))
    if holds_run(folder):
        steps = [stored.step_of(path) for path in stored.paths(folder / CHECKPOINTS)]
        use = f", or use a checkpoint: {folder / f'step-{steps[-1]}'}" if steps else ""
        others = (run for run in folder.parent.glob("*") if is_run(run.name, name))
        finished = [run for run in others if (run / "adapter").exists() or (run / "model").exists()]
        other = max(finished, key=_written, default=None)
        raise ConfigError(
            f"{folder} has no adapter and no model yet: the training has not finished. Give its command again; it "
            f"continues{use}.{f' The newest finished run of this name is {other}.' if other else ''}"
        )
    raise ConfigError(f"{folder} is no run, adapter or model of fxtune: it holds no config.yaml and no config.json.")


def run_folder(name: str) -> Path:
    """The run or the folder of runs that `name` means. For a run's adapter or model: the folder of the run. Raises
    ConfigError."""
    folder = find_folder(name)
    if folder is None:
        raise unknown(name)
    run = _run_of(folder)
    if run and is_checkpoint(folder):
        raise ConfigError(f"{name} is a checkpoint, and this command takes a run: {run}")
    return run or folder


def find_folder(name: str) -> Path | None:
    """The folder that `name` means; None if it means no folder. Raises ConfigError for a step that the run lacks."""
    path = Path(os.path.expanduser(name))
    if any(os.path.isfile(path / file) for file in (ADAPTER_FILE, "config.json", "config.yaml")):
        return path
    head, *rest = path.parts or (name,)
    newest = _newest(head)
    for place in (newest.joinpath(*rest) if newest else path, path):
        if os.path.isdir(place):
            return place
        if STEP.fullmatch(place.name) and (found := _checkpoint(place, name)):
            return found
    return None


def unknown(name: str) -> ConfigError:
    """The error for a name that means nothing here."""
    if name in discovery.recipes():
        return ConfigError(f"`{name}` is a recipe that has no run here: write +recipe={name} for the recipe.")
    folders = [folder for folder in sorted(RUNS.glob("*")) if folder.is_dir()]
    known = [str(folder) if name.startswith(f"{RUNS}/") else folder.name for folder in folders]
    tried = f"runs/{name}" if len(Path(name).parts) == 1 else None
    looked = " and ".join(filter(None, [f"./{name}" if tried else name, tried]))
    return ConfigError(f"there is no run `{name}` (looked for {looked}){did_you_mean(name, known)}")


def is_run(name: str, root: str) -> bool:
    """Whether a folder is a run of the recipe `root`: NAME, NAME-2, NAME-3, ..."""
    number = name.removeprefix(root)
    return name.startswith(root) and (not number or (number.startswith("-") and number[1:].isdigit()))


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder has the place and the name of a checkpoint."""
    return folder in stored.paths(folder.parent)


def _newest(name: str) -> Path | None:
    named = [folder for folder in RUNS.glob("*") if folder.is_dir() and is_run(folder.name, name)]
    return max(named, key=_written, default=None)


def _written(folder: Path) -> float:
    return folder.stat().st_mtime


def _checkpoint(place: Path, name: str) -> Path | None:
    """The checkpoint of the step that `place` names, in a run or its folder of checkpoints. None for other places."""
    for folder in (place.parent, place.parent / CHECKPOINTS):
        if not os.path.isdir(folder):
            continue
        found = {stored.step_of(path): path for path in stored.paths(folder)}
        if found or folder.name == CHECKPOINTS:
            step = int(place.name.removeprefix("step-"))
            if step not in found:
                there = ", ".join(map(str, found)) or "none"
                raise ConfigError(f"{name}: there is no such checkpoint. The steps in {folder}: {there}.")
            return found[step]
    return None


def _run_of(folder: Path) -> Path | None:
    """The run that `folder` is, or the run that the checkpoint or export in `folder` belongs to."""
    levels = 2 if is_checkpoint(folder) else 1
    above = (folder if len(folder.parts) > levels else folder.absolute()).parents[levels - 1]
    return next((run for run in (folder, above) if holds_run(run)), None)
