"""Notes each rank's present work in a small file. The launcher reads the files to find a rank that hangs, and to say
what a dead rank was doing.

The file is a memory map of 256 bytes, so a note costs a microsecond and survives a SIGKILL of its writer. A thread
increments a count in the file every second. If the count stands still, the process or the machine is stopped, or a
call holds Python's lock.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fxtune.distributed.ranks import HEARTBEATS
from fxtune.errors import RankError

SIZE = 256
HOST = socket.gethostname()
_NOTE = SIZE - 8
"""Bytes of the note; the rest is the count."""
PULSE_SECONDS = 1.0
SAVING_SECONDS = 600
"""How long ranks may take to save after a signal before they are killed."""
FORWARD_BACKWARD = "forward and backward"
"""The note of a rank in a step, until the rank has its gradients."""
SAVING, EXPORTING = "saving", "exporting"
WRITING = (SAVING, EXPORTING)
"""The notes of a rank that is writing files, which must become complete."""


@dataclass(frozen=True)
class Beat:
    """The last note of a rank."""

    step: int = 0
    """The number of optimizer steps that the rank has begun."""
    doing: str = "starting"
    waits: bool = False
    """Whether the rank waits for other ranks."""
    since: float = 0.0
    """time.monotonic() of the note; all processes of a host share this clock."""
    process: int = 0
    pulse: int = 0
    """The count of the rank's thread, which grows by 1 every PULSE_SECONDS."""
    host: str = HOST

    def __str__(self) -> str:
        return f"{f'step {self.step}, ' if self.step else ''}{self.doing}"


class Heartbeat:
    """Writes the notes of this rank."""

    def __init__(self, path: Path | None) -> None:
        self.step, self._doing = 0, "starting"
        self.last = Beat(since=time.monotonic())
        self._map: mmap.mmap | None = None
        if path is not None:
            with path.open("w+b") as file:
                file.truncate(SIZE)
                self._map = mmap.mmap(file.fileno(), SIZE)
            self._write(self._doing, waits=False)
            threading.Thread(target=self._count, args=(os.getpid(),), name="fxtune-heartbeat", daemon=True).start()

    @staticmethod
    def open(rank: int) -> Heartbeat:
        """The heartbeat of `rank`, in the folder that fxtune's launcher made. Writes nothing without a launcher."""
        folder = os.environ.get(HEARTBEATS)
        return Heartbeat(Path(folder) / str(rank) if folder else None)

    def doing(self, what: str, step: int | None = None) -> None:
        """Note that this rank does `what`, in step `step` (from 1)."""
        self.step = self.step if step is None else step
        self._doing = what
        self._write(what, waits=False)

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Note that in the body this rank waits for others in a collective named `what`."""
        self._write(what, waits=True)
        try:
            yield
        finally:
            self._write(self._doing, waits=False)

    def _write(self, what: str, waits: bool) -> None:
        beat = self.last = Beat(self.step, what[:120], waits, round(time.monotonic(), 3), os.getpid())
        if self._map is not None:
            text = json.dumps([beat.step, beat.doing, beat.waits, beat.since, beat.process]).encode()
            self._map[:_NOTE] = text[:_NOTE].ljust(_NOTE)

    def _count(self, process: int) -> None:
        pulse, launcher, orphaned_seconds = 0, os.getppid(), 0.0
        while self._map is not None and os.getpid() == process:
            pulse += 1
            self._map[_NOTE:] = struct.pack("q", pulse)
            time.sleep(PULSE_SECONDS)
            orphaned_seconds += PULSE_SECONDS * (os.getppid() != launcher)
            if orphaned_seconds > SAVING_SECONDS:  # the launcher is gone, and this rank may wait for a dead rank
                os._exit(RankError.exit_code)


def read(folder: Path) -> dict[int, Beat]:
    """The last beat of each rank that has written a beat."""
    beats = {}
    for path in folder.iterdir():
        try:
            rank, content = int(path.name), path.read_bytes()
            beats[rank] = Beat(*json.loads(content[:_NOTE]), *struct.unpack("q", content[_NOTE:]))
        except (ValueError, struct.error):  # half written, still empty, or not a heartbeat
            continue
    return beats
