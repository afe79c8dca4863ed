"""The lock of a run folder: the operating system's lock (flock), and a note about its holder.

flock works for every path to the folder, and the death of a process releases it. On some network file systems a second
host gets the lock, too. So the holder writes a note next to the lock, with its host and a growing count. A process
that gets the lock and finds the note of another host waits to see whether the count grows. An orderly end removes the
note, so only a run that died on one host and continues on another host has to wait.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

LOCK, HOLDER = ".lock", ".holder"
COUNT_SECONDS = 5.0
"""Seconds after which the holder writes its next count."""
WATCH_SECONDS = 3 * COUNT_SECONDS
"""If the count of another host stands still for this many seconds, its run counts as dead."""


class FolderLock:
    """The lock of `folder` for this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = FileLock(folder / LOCK)
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self) -> bool:
        """Take the lock. Returns False if a living process has the lock. Raises OSError."""
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            return False
        if self._another_host_counts():
            self._lock.release()
            return False
        self._note(0)
        self._thread = threading.Thread(target=self._count, name="fxtune-folder-lock", daemon=True)
        self._thread.start()
        return True

    def release(self) -> None:
        """Give the lock back, if this process has it."""
        if self._thread is not None:
            self._over.set()
            self._thread.join()
            self._thread = None
            with suppress(OSError):
                (self.folder / HOLDER).unlink(missing_ok=True)
        self._lock.release()

    def holder(self) -> str:
        """The lock's holder, as the end of a message: ` (process 7 on alpha)`; empty if its note cannot be read."""
        note = self._read()
        return f" (process {note.get('process')} on {note.get('host')})" if note else ""

    def _another_host_counts(self) -> bool:
        first = self._read()
        if not first or first.get("host") == socket.gethostname():
            return False
        until = time.monotonic() + WATCH_SECONDS
        while time.monotonic() < until:
            time.sleep(COUNT_SECONDS / 10)
            if (now := self._read()) and now != first:
                return True
        return False

    def _count(self) -> None:
        count = 0
        while not self._over.wait(COUNT_SECONDS):
            count += 1
            with suppress(OSError):  # a full disk does not end the run
                self._note(count)

    def _note(self, count: int) -> None:
        note = {"host": socket.gethostname(), "process": os.getpid(), "count": count}
        (self.folder / HOLDER).write_text(json.dumps(note))

    def _read(self) -> dict[str, Any]:
        """The holder's note; empty if there is no note. A half-written note is read again."""
        until = time.monotonic() + COUNT_SECONDS
        while True:
            try:
                note = json.loads((self.folder / HOLDER).read_text())
                return note if isinstance(note, dict) else {}
            except OSError:
                return {}
            except ValueError:
                if time.monotonic() > until:
                    return {}
                time.sleep(COUNT_SECONDS / 100)
