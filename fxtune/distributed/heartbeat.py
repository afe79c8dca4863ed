"""What each rank is doing, in a small file that the launcher reads when a rank dies or hangs.

The file is a memory map of 256 bytes, so a note costs a microsecond and survives a SIGKILL of its writer.
"""

from __future__ import annotations

import json
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fxtune.distributed.ranks import HEARTBEATS

SIZE = 256


@dataclass(frozen=True)
class Beat:
    """The last note of a rank."""

    step: int = 0
    """Optimizer steps begun."""
    doing: str = "starting"
    waits: bool = False
    """Whether it waits for other ranks."""
    since: float = 0.0
    """time.time() of the note."""

    def __str__(self) -> str:
        return f"{f'step {self.step}, ' if self.step else ''}{self.doing}"


class Heartbeat:
    """Writes the notes of this rank."""

    def __init__(self, path: Path | None) -> None:
        self.step, self._doing = 0, "starting"
        self._map: mmap.mmap | None = None
        if path is not None:
            with path.open("w+b") as file:
                file.truncate(SIZE)
                self._map = mmap.mmap(file.fileno(), SIZE)
            self._write(self._doing, waits=False)

    @staticmethod
    def open(rank: int) -> Heartbeat:
        """The heartbeat of `rank`, in the folder that fxtune's launcher made; without one it writes nothing."""
        folder = os.environ.get(HEARTBEATS)
        return Heartbeat(Path(folder) / str(rank) if folder else None)

    def doing(self, what: str, step: int | None = None) -> None:
        """Note that this rank does `what`, in step `step` (from 1)."""
        self.step = self.step if step is None else step
        self._doing = what
        self._write(what, waits=False)

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """In the body this rank waits for others in a collective named `what`."""
        self._write(what, waits=True)
        try:
            yield
        finally:
            self._write(self._doing, waits=False)

    def _write(self, what: str, waits: bool) -> None:
        if self._map is not None:
            text = json.dumps([self.step, what[:120], waits, round(time.time(), 3)]).encode()
            self._map[:] = text[:SIZE].ljust(SIZE)


def read(folder: Path) -> dict[int, Beat]:
    """The last beat of each rank that has written one."""
    beats = {}
    for path in folder.iterdir():
        try:
            beats[int(path.name)] = Beat(*json.loads(path.read_bytes()))
        except ValueError:  # read in the middle of a write, or not begun
            continue
    return beats
