"""metrics.jsonl, the history of a run: one JSON object a line, each written at once and whole.

A run that goes on cuts off the lines of the steps that it does again and the piece of a line that a kill left, so each figure
of each step is there once. A disk that takes no more loses nothing: lines wait in memory, half a kilobyte each, and are written
where they belong as soon as there is room. What never was written is said, at the end and by the run that goes on.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from fxtune.system.atomic_files import replacing
from fxtune.tracking.wandb_worker import STEP

NAME = "metrics.jsonl"


class History:
    """Of the run in `folder`, of which `step` optimizer steps are done; 0 starts it anew. Never raises.

    `logged`: the last of these steps whose figures were logged, where that is known. `note` gets one-line messages for the user.
    """

    def __init__(self, folder: Path, step: int, logged: int | None, note: Callable[[str], None]) -> None:
        self.path = folder / NAME
        self.kept: set[frozenset[str]] = set()
        """The names in each line of `step`."""
        self._note = note
        self._file: IO[bytes] | None = None
        self._end = 0
        self._waiting = b""
        """Whole lines that the disk did not take."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            last, self.kept = _keep_until(self.path, step)
            self._file = self.path.open("ab", buffering=0)  # nothing stays behind in a buffer of Python's
            self._end = self._file.tell()
        except OSError as error:
            note(f"{self.path} cannot be written ({error}); training goes on without it")
            return
        if isinstance(logged, int) and last < logged <= step:
            note(
                f"{self.path} has no lines of steps {last + 1} to {logged}, which were logged: a full disk or a power cut took "
                "them. Training goes on all the same."
            )

    def write(self, line: dict[str, Any]) -> int | None:
        """Add a line. Returns where it ends in the file, in bytes, be it there already or not; None where there is no file."""
        if self._file is None:
            return None
        text = (json.dumps(_finite(line)) + "\n").encode()
        first = not self._waiting
        self._waiting += text
        self._end += len(text)
        if (error := self._flush()) and first:
            self._note(
                f"{NAME} could not be written at step {line[STEP]} ({error}); training goes on, and its lines wait in "
                "memory until there is room"
            )
        return self._end

    def close(self) -> None:
        """Write what still waits, or say that it is lost. Safe to call twice."""
        if self._file is None:
            return
        if error := self._flush():
            since = json.loads(self._waiting.partition(b"\n")[0])[STEP]
            self._note(f"{self.path} lacks its last lines, from step {since} on: {error}")
        file, self._file = self._file, None
        try:
            file.close()
        except OSError as error:
            self._note(f"{self.path}: {error}")

    def _flush(self) -> OSError | None:
        assert self._file is not None
        try:
            taken = self._file.write(self._waiting) or 0
            whole = self._waiting.rfind(b"\n", 0, taken) + 1
            self._waiting = self._waiting[whole:]
            if self._waiting:
                if taken > whole:  # a piece of a line does not stay
                    self._file.truncate(self._end - len(self._waiting))
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            return error
        return None


def _keep_until(path: Path, step: int) -> tuple[int, set[frozenset[str]]]:
    """Drop the lines beyond `step`, and what a kill or a full disk left of a line; whole or not at all. Raises OSError.

    Returns the step of the last line that is left (0: there is none), and the names in each line of `step`.
    """
    if not path.is_file():
        return 0, set()
    last, names = 0, set()
    size = end = 0
    for start, line, values in _lines(path, step):
        size, end, last = size + len(line), start + len(line), values[STEP]
        if last == step:
            names.add(frozenset(values) - {STEP, "time"})
    if size == end:  # what goes stands at the end, as almost always: to cut it off needs no room on the disk
        with path.open("r+b") as file:
            file.truncate(end)
            os.fsync(file.fileno())
        return last, names
    with replacing(path) as new:
        for _, line, _ in _lines(path, step):
            new.write(line)
    return last, names


def _lines(path: Path, step: int) -> Iterator[tuple[int, bytes, dict[str, Any]]]:
    """The whole lines of steps up to `step`, none where that is 0: where each starts, its bytes and what it says."""
    end = 0
    with path.open("rb") as file:
        for line in file:
            start, end = end, end + len(line)
            try:
                values = json.loads(line)
                keep = line.endswith(b"\n") and 0 <= values[STEP] <= step > 0
            except (ValueError, TypeError, LookupError, RecursionError):
                continue
            if keep:
                yield start, line, values


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """NaN and infinities as null: JSON has no word for them, and pandas, jq and DuckDB read null as a missing number."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }
