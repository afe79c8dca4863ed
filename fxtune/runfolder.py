"""A run's folder: found, claimed and locked, so that no run is overwritten and no two write to one.

    runs/NAME/  config.yaml  evidence.json  metrics.jsonl  checkpoints/  adapter/ (or model/)  result.json, written last
                compile.json, where something is compiled
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from fxtune.errors import ConfigError, StorageError

FREE_ON_RESUME = ("run.dir", "run.resume", "run.device", "tracking", "loader", "checkpoint", "train.log_every",
                  "data.workers", "data.cache_dir", "data.questions")
"""Keys that may differ when a run goes on: none of them changes what is learned."""


@dataclass
class RunFolder:
    path: Path
    resumed: bool
    """The folder holds an unfinished run of the same config."""
    lock: FileLock

    @property
    def finished(self) -> bool:
        return (self.path / "result.json").exists()

    def finish(self, result: dict[str, Any]) -> None:
        """Mark the run as finished, with its last figures."""
        staging = self.path / ".result.json"
        staging.write_text(json.dumps(result, indent=1))
        os.replace(staging, self.path / "result.json")

    def abandon(self) -> None:
        """Give the folder up if the run came to nothing, so that the corrected command does not get another number."""
        if not self.resumed and not (self.path / "metrics.jsonl").exists():
            for name in ("config.yaml", ".lock"):
                (self.path / name).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # something else lies there: it stays
                self.path.rmdir()

    def release(self) -> None:
        self.lock.release()


def claim(name: str, folder: str | None, resume: str, config: dict[str, Any]) -> RunFolder:
    """Find this run's folder and lock it; `config` is the whole config as plain data and is written there.

    Without `folder` the run lives in runs/NAME, or runs/NAME-2 and so on. resume: `auto` goes on with the newest unfinished
    run of the same config, else takes a new folder; `never` always takes a new one; `must` fails where there is nothing to
    go on with. A `folder` that is given is used as it is: what stands in the way is an error.
    """
    root = Path(folder) if folder else Path("runs") / name
    try:
        if folder is None:
            return _claim_numbered(root, resume, config)
        found = _open(root)
        if found is None:
            raise StorageError(f"{root} is in use by a run that is alive. Wait for it, or set run.dir to another folder.")
        before = _recorded(root)
        if before is None:
            if resume == "must":
                raise ConfigError(f"run.resume=must, but {root} holds no run. Check run.dir, or use run.resume=auto.")
            return _start(found, config)
        changed = differences(before, config)
        if resume == "never":
            raise ConfigError(f"{root} already holds a run, and run.resume=never would write over it. "
                              "Set run.dir to a new folder, or use run.resume=auto to go on with it.")
        if changed:
            raise ConfigError(f"{root} holds a run of another config, so it cannot go on with this one:\n" + "\n".join(changed)
                              + "\nPut these back, or set run.dir to a new folder.")
        found.resumed = True
        return found
    except OSError as error:
        raise StorageError(f"The run folder {root} cannot be used: {error}. "
                           "Set run.dir to a folder that can be written.") from error


def _claim_numbered(root: Path, resume: str, config: dict[str, Any]) -> RunFolder:
    ours = re.compile(re.escape(root.name) + r"(?:-([1-9]\d*))?")
    numbers = {path: int(match[1] or 1) for path in root.parent.glob("*") if (match := ours.fullmatch(path.name))}
    taken = max(numbers.values(), default=0)  # folders before it may have been deleted
    unlike: list[str] = []
    if resume != "never":
        for path in sorted(numbers, key=lambda path: numbers[path], reverse=True):
            before = _recorded(path)
            if before is None or (path / "result.json").exists():
                continue
            changed = differences(before, config)
            if not changed and (found := _open(path)):
                found.resumed = True
                return found
            unlike = unlike or ([f"{path}:", *changed] if changed else [])
    if resume == "must":
        raise ConfigError(f"run.resume=must, but no unfinished run of this config lies in {root}*."
                          + ("\nThe newest unfinished one differs: " + "\n".join(unlike) if unlike else ""))
    while True:  # another process may take the same number at the same moment: mkdir tells who was first
        taken += 1
        path = root.with_name(_numbered(root.name, taken))
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        found = _open(path)
        if found is not None:
            return _start(found, config)


def _numbered(name: str, number: int) -> str:
    return name if number == 1 else f"{name}-{number}"


def _open(path: Path) -> RunFolder | None:
    path.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return None
    return RunFolder(path, resumed=False, lock=lock)


def _start(found: RunFolder, config: dict[str, Any]) -> RunFolder:
    staging = found.path / ".config.yaml"
    staging.write_text(yaml.safe_dump(config, sort_keys=False, allow_unicode=True))
    os.replace(staging, found.path / "config.yaml")
    return found


def _recorded(path: Path) -> dict[str, Any] | None:
    file = path / "config.yaml"
    return yaml.safe_load(file.read_text()) if file.exists() else None


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """One line a key that would change what is learned: `  optimizer.lr: 0.0002 -> 0.0001`."""
    old, new = _flat(before), _flat(now)
    return [f"  {key}: {old.get(key, '(absent)')} -> {new.get(key, '(absent)')}" for key in sorted(old | new)
            if old.get(key) != new.get(key) and not any(key == free or key.startswith(free + ".") for free in FREE_ON_RESUME)]


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, inner in items:
        flat.update(_flat(inner, f"{prefix}.{key}" if prefix else str(key)))
    return flat
