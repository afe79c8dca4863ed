"""Processes of this machine, as /proc shows them. A process may end between two looks at it, which is no error here."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def alive(pid: int | str) -> bool:
    """Whether a process runs. A zombie does not: in a container whose first process collects no orphans, it stays."""
    return _status(pid)[0] not in "ZX"


def waits(pid: int | str) -> bool:
    """Whether a process's main thread waits, as in a write to a full pipe: it neither runs nor could run."""
    return _status(pid)[0] == "S"


def stopped(pid: int | str) -> bool:
    """Whether SIGSTOP has stopped a process."""
    return _status(pid)[0] == "T"


def children(pid: int, part: str = "") -> list[int]:
    """The living children of a process whose command line contains `part`, oldest first."""
    found = set()
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                found |= set(map(int, (thread / "children").read_text().split()))
    return sorted(child for child in found if alive(child) and part in command_line(child))


def command_line(pid: int) -> str:
    """The words with which a process was started; empty if it is gone."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
    return ""


def group(leader: int) -> list[int]:
    """The living processes of a process group."""
    pids = [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]
    return [pid for pid in pids if alive(pid) and _status(pid)[2:3] == [str(leader)]]


def _status(pid: int | str) -> list[str]:
    """State, parent, process group, and so on. The state of a process that is gone is X."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return ["X"]
