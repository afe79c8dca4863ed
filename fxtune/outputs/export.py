"""Exports what a run has trained: the one way of `fxtune merge`, `fxtune push` and `fxtune export`.

outputs/targets has a file for each target. A target first says what it cannot serve, before weights are read; then it
writes its files and names the command that serves them.
"""

from __future__ import annotations

from pathlib import Path

from fxtune.errors import ConfigError, did_you_mean
from fxtune.outputs.targets.model import ModelTarget
from fxtune.outputs.targets.source import Source
from fxtune.outputs.targets.target import Exported, ExportOptions, Target
from fxtune.outputs.targets.vllm import VllmTarget

TARGETS: dict[str, type[Target]] = {"model": ModelTarget, "vllm": VllmTarget}


def export(
    name: str,
    to: str = "model",
    folder: Path | str | None = None,
    options: ExportOptions | None = None,
    trust_remote_code: bool = False,
) -> Exported:
    """Write the adapter or the model `name` (a run, a checkpoint, a folder, or the hub id of an adapter) for the
    target `to` into a new folder. Without `folder` it lies in the run.

    Raises ConfigError if the target cannot serve it, StorageError if files cannot be read or written.
    """
    options = options or ExportOptions()
    if to not in TARGETS:
        known = ", ".join(TARGETS)
        raise ConfigError(f"--to {to}: there is no such target (known: {known}){did_you_mean(to, TARGETS)}")
    if unread := options.given() - TARGETS[to].reads:
        option = min(unread).replace("_", "-")
        takers = [f"--to {other}" for other, target in TARGETS.items() if min(unread) in target.reads]
        raise ConfigError(f"--{option} has no meaning for --to {to}; it is for {' and '.join(takers)}. Leave it out.")
    target = TARGETS[to](Source(name, trust_remote_code), options)
    place = None if folder is None else Path(folder)
    target.check(place)
    return target.write(place)
