"""The lineage of a run: the refreshes of its model, and which of these models serves now.

    runs/NAME                   the first run; it is never changed
    runs/NAME.refresh/
        current -> ../NAME      the run that serves: a link, replaced atomically when a refresh is promoted
        lineage.json            each refresh: parent, digests of the data, decisions and figures
        run-1/                  the run of a refresh: its adapter or model, checkpoints, config, promoted or not
        run-1.yaml              its recipe
        run-1.rows-0.jsonl      the new rows of its training data

So the model to serve is always `runs/NAME.refresh/current/adapter`, or `current/model` after full fine-tuning. To go
back to an earlier model, replace the link.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fxtune.checkpoint.folder_lock import HOLDER, LOCK, FolderLock
from fxtune.errors import ConfigError, StorageError, readable, writing
from fxtune.system.files.atomic_files import read_json, replace_text, sync

SUFFIX = ".refresh"
CURRENT, LINEAGE = "current", "lineage.json"


@dataclass
class Lineage:
    """The locked lineage in `folder`. `refreshes`: the entry of each refresh in lineage.json."""

    folder: Path
    lock: FolderLock
    refreshes: list[dict[str, Any]] = field(default_factory=list)

    @property
    def first(self) -> Path:
        """The folder of the first run."""
        return self.folder.with_name(self.folder.name.removesuffix(SUFFIX))

    @property
    def serving(self) -> Path:
        """The folder of the run that serves."""
        return Path(os.path.normpath(self.folder / os.readlink(self.folder / CURRENT)))

    def save(self) -> None:
        """Write lineage.json, completely or not at all. Raises StorageError."""
        value = {"version": 1, "refreshes": self.refreshes}
        with writing(f"{self.folder / LINEAGE} cannot be written"):
            replace_text(self.folder / LINEAGE, json.dumps(value, indent=1))

    def serve(self, run: Path) -> None:
        """Let `run` serve. A reader sees either the old link or the new one. Raises StorageError."""
        staging = self.folder / f".{CURRENT}"
        with writing(f"{self.folder / CURRENT} cannot be replaced"):
            staging.unlink(missing_ok=True)
            staging.symlink_to(os.path.relpath(run, self.folder), target_is_directory=True)
            os.replace(staging, self.folder / CURRENT)
            sync(self.folder)

    def next_number(self) -> int:
        return 1 + max((entry["number"] for entry in self.refreshes), default=0)

    def release(self) -> None:
        """Unlock the lineage. If its folder has no lineage.json, remove the folder."""
        self.lock.release()
        if not (self.folder / LINEAGE).exists():
            with contextlib.suppress(OSError):  # the folder stays if it has other files
                for name in (CURRENT, f".{CURRENT}", HOLDER, LOCK):
                    (self.folder / name).unlink(missing_ok=True)
                self.folder.rmdir()


def open_lineage(run: Path) -> Lineage:
    """Lock and read the lineage of `run`; make its folder if necessary. `run`: the folder of a run, the folder
    NAME.refresh, or `current` in NAME.refresh.

    Raises ConfigError if `run` is a refresh that does not serve, and StorageError if the folder is in use or damaged.
    """
    folder = _folder(run)
    with writing(f"{folder} cannot be used"):
        folder.mkdir(exist_ok=True)
        lock = FolderLock(folder)
        if not lock.acquire():
            raise StorageError(f"{folder} is in use by another refresh{lock.holder()}. Wait for it.")
    found = Lineage(folder, lock)
    try:
        if (folder / LINEAGE).exists():
            found.refreshes = _read(folder / LINEAGE)
        if not (folder / CURRENT).is_symlink():
            found.serve(found.first)
    except BaseException:
        found.release()
        raise
    return found


def _folder(run: Path) -> Path:
    """The folder of the lineage to which `run` belongs."""
    absolute = Path(os.path.abspath(run))
    if absolute.name.endswith(SUFFIX):
        return run
    if not absolute.parent.name.endswith(SUFFIX):
        return run.with_name(absolute.name + SUFFIX) if run.name else absolute.with_name(absolute.name + SUFFIX)
    folder = run.parent if run.name else absolute.parent
    link = folder / CURRENT
    if run.name != CURRENT and link.is_symlink() and link.resolve() != absolute.resolve():
        raise ConfigError(f"{run} does not serve: {link} is {os.readlink(link)}. Refresh that, or replace the link.")
    return folder


def _read(file: Path) -> list[dict[str, Any]]:
    with readable(f"{file} cannot be used", "Bring it back, or move it away to begin anew."):
        entries = read_json(file)["refreshes"]
        if not all(isinstance(entry, dict) and type(entry.get("number")) is int for entry in entries):
            raise ValueError("it has no list of refreshes")
        return list(entries)
