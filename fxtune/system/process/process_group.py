"""Runs a command with its children as one process group, which never outlives the caller."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

GRACE = 5.0
"""Seconds between asking a process to end and killing it."""
TAIL = 4000
"""Bytes at the end of the output that are kept."""
RANKS = ("TORCHELASTIC_", "RANK", "LOCAL_RANK", "GROUP_", "ROLE_", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_")
"""The beginnings of variables that make a process a rank of this run."""
PACKAGES = str(Path(__file__).parents[3])
_PRELUDE = """import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
if os.getppid() != int(sys.argv[1]):  # the parent died before the line above
    os._exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""


def run_process(command: Sequence[str], limit: float | None = None) -> tuple[int | None, str, float]:
    """Run a process that can import this fxtune, for at most `limit` seconds. Its process group is always killed at
    the end. Returns (exit code, or None at the limit; the end of its output; its run time in seconds)."""
    return Captured(command, subprocess.DEVNULL).result(limit)


class Captured:
    """A process that can import this fxtune, and its output. The caller must call result() or end()."""

    def __init__(self, command: Sequence[str], stdin: int = subprocess.PIPE) -> None:
        self._start, self._output = time.monotonic(), tempfile.TemporaryFile()  # noqa: SIM115  closed by end()
        self._process = start_process(command, stdin=stdin, stdout=self._output, stderr=subprocess.STDOUT)

    def tell(self, text: str) -> None:
        """Write `text` to the process's standard input and close the input. Does nothing if the process has ended."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(text.encode())

    def result(self, limit: float | None) -> tuple[int | None, str, float]:
        """Wait at most `limit` seconds for the process to end. Returns what run_process() returns. The run time counts
        from the start of the process."""
        try:
            code = self._process.wait(limit)
        except subprocess.TimeoutExpired:
            return None, _tail(self._output), time.monotonic() - self._start  # read before end() interrupts it
        else:
            return code, _tail(self._output), time.monotonic() - self._start
        finally:
            self.end()

    def end(self) -> None:
        """Kill the process group, if it still runs, and drop the output."""
        end_process(self._process)
        self._output.close()


def start_process(
    command: Sequence[str], environment: Mapping[str, str] | None = None, foreign: bool = False, **pipes: Any
) -> subprocess.Popen[bytes]:
    """Start a process that can import this fxtune, as the leader of a process group. The caller must end the process;
    if the calling thread dies first, Linux kills the process. `environment`: variables to add to this process's
    variables. `foreign`: the process belongs to another environment, so it gets no path to fxtune or to fxtune's
    compiled files, and is no rank of this run."""
    # An installed fxtune needs no entry. Its site-packages, first in PYTHONPATH, would hide the user's own entries.
    own = None if sysconfig.get_path("purelib") == PACKAGES else PACKAGES
    path = os.pathsep.join(filter(None, [own, os.environ.get("PYTHONPATH")]))
    # `python -m` and `-c` search the working directory first: a numbers.py among a user's files must not be imported.
    own_variables = {"PYTHONPATH": "" if foreign else path, "PYTHONSAFEPATH": "1"}
    given = {
        name: value
        for name, value in os.environ.items()
        if not (foreign and name.startswith((*RANKS, "PYTHONPYCACHEPREFIX")))
    }
    return subprocess.Popen(
        [*_die_with_parent(), *command],
        start_new_session=True,
        env={**given, **(environment or {}), **own_variables},
        **pipes,
    )


def _tail(output: IO[bytes]) -> str:
    """The end of a file that another process may still write to; pread leaves the shared file position alone."""
    size = os.fstat(output.fileno()).st_size
    return os.pread(output.fileno(), TAIL, max(0, size - TAIL)).decode(errors="replace")


def end_process(process: subprocess.Popen[bytes]) -> None:
    """End the process by SIGINT, so that it removes its temporary files, then kill its group."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # start_new_session made it the leader of a group
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE)


def _die_with_parent() -> list[str]:
    """Words to put before a command, so that Linux kills the command when this process dies; empty on other systems.
    They start a small program that sets the signal and then becomes the command. `preexec_fn` could set the signal,
    too, but it may hang forever if other threads run."""
    if not sys.platform.startswith("linux"):
        return []
    return [sys.executable, "-I", "-S", "-c", _PRELUDE, str(os.getpid())]
