"""metrics.jsonl, the history of a run: one JSON object per line. A line is written immediately and completely.

A resumed run removes the lines of the steps that it repeats, and an incomplete line that a kill left, so each figure
of a step appears once. A full disk loses no line: lines wait in memory, half a kilobyte each, and are written in order
once there is room. Lines that were never written are reported at the end of the run, and again by a resumed run.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from fxtune.system.files.atomic_files import replacing
from fxtune.tracking.worker import HISTORY, STEP


class MetricsFile:
    """metrics.jsonl of the run in `folder`, which goes on after `step` optimizer steps. The lines of later steps are
    removed; step 0 empties the file. Never raises.

    `logged`: the last step up to `step` that the run logged, if known. `note` gets one-line messages for the user.
    """

    def __init__(self, folder: Path, step: int, logged: int | None, note: Callable[[str], None]) -> None:
        self.path = folder / HISTORY
        self.kept: set[frozenset[str]] = set()
        """The names of the figures in each existing line of `step`."""
        self._note = note
        self._file: IO[bytes] | None = None
        self._end = 0
        self._waiting = b""
        """Complete lines that are not on the disk yet."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            last, self.kept = _keep_until(self.path, step)
            self._file = self.path.open("ab", buffering=0)
            self._end = self._file.tell()
        except OSError as error:
            note(f"{self.path} cannot be written ({error}); training goes on without it")
            return
        if isinstance(logged, int) and last < logged <= step:
            note(
                f"{self.path} has no lines of steps {last + 1} to {logged}, which were logged: a full disk or a "
                "power cut took them. Training goes on all the same."
            )

    def write(self, line: dict[str, Any]) -> None:
        if self._file is None:
            return
        first = not self._waiting
        # JSON has no NaN and no infinities; pandas, jq and DuckDB read null as a missing number.
        bad = {name: None for name, value in line.items() if isinstance(value, float) and not math.isfinite(value)}
        self._waiting += (json.dumps(line | bad) + "\n").encode()
        if (error := self._flush()) and first:
            self._note(
                f"{HISTORY} could not be written at step {line[STEP]} ({error}); training goes on, and its lines wait "
                "in memory until there is room"
            )

    def close(self) -> None:
        """Write the waiting lines, or report that they are lost. Safe to call twice."""
        if self._file is None:
            return
        if error := self._flush():
            since = json.loads(self._waiting.partition(b"\n")[0])[STEP]
            self._note(f"{self.path} lacks its last lines, from step {since} on: {error}")
        file, self._file = self._file, None
        try:
            file.close()
        except OSError as error:  # NFS reports lost bytes here
            self._note(f"{self.path}: {error}")

    def _flush(self) -> OSError | None:
        """Write the waiting lines. If a line does not fit, no part of it stays in the file."""
        assert self._file is not None
        try:
            taken = self._file.write(self._waiting) or 0
            complete = self._waiting.rfind(b"\n", 0, taken) + 1
            self._waiting, self._end = self._waiting[complete:], self._end + complete
            if self._waiting:
                if taken > complete:
                    self._file.truncate(self._end)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            return error
        return None


def _keep_until(path: Path, step: int) -> tuple[int, set[frozenset[str]]]:
    """Remove incomplete lines and the lines of steps after `step`. Either all of them go or none. Raises OSError.

    Returns the step of the last line that stays (0 if no line stays), and the names in each line of `step`.
    """
    if not path.is_file():
        return 0, set()
    last, names = 0, set()
    size = end = 0
    for start, line, values in _lines(path, step):
        size, end, last = size + len(line), start + len(line), values[STEP]
        if last == step:
            names.add(frozenset(values) - {STEP, "time"})
    if size == end:  # the usual case: only the end of the file is cut off, which needs no room on the disk
        with path.open("r+b") as file:
            file.truncate(end)
            os.fsync(file.fileno())
        return last, names
    with replacing(path) as new:
        for _, line, _ in _lines(path, step):
            new.write(line)
    return last, names


def _lines(path: Path, step: int) -> Iterator[tuple[int, bytes, dict[str, Any]]]:
    """Yield (offset, bytes, values) of each complete line of the first `step` steps; no line if `step` is 0."""
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
