"""Runs of several ranks on the CPU, forked from a parent that has imported all packages."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from support.injected import VARIABLE
from support.killing import Forked, ForkServer, tail

from fxtune.system.process.threads import PROCESSES

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""For runs whose bits are compared: by default each of two ranks has half of the threads of one process, and another
number of threads sums in another order."""


_PORTS = itertools.count(61 * os.getpid())
_TAKEN: list[socket.socket] = []
"""A socket with the name of each port that this process has handed out, so that no other test worker hands it out."""


def free_port() -> int:
    """A port at which nothing listens. It lies below the ports that Linux hands out to programs that name none, so that
    no connection takes it before the ranks do."""
    while True:
        port = 10_000 + next(_PORTS) % 20_000
        taken = socket.socket(socket.AF_UNIX)
        try:
            taken.bind(f"\0fxtune-test-port-{port}")  # no file, and gone with this process
            with socket.socket() as tried:
                tried.bind(("127.0.0.1", port))
        except OSError:
            taken.close()
        else:
            _TAKEN.append(taken)
            return port


def messages(folder: Path) -> list[str]:
    """The messages with which the runs in `folder` ended, without the lines about a rank that is late."""
    lines = [line for line in tail(folder, 10**6).splitlines() if line.startswith("fxtune:")]
    return [line for line in lines if not line.startswith("fxtune: all ranks have waited")]


@dataclass
class Ranks:
    """Starts runs of `count` ranks, as fxtune's launcher does."""

    server: ForkServer
    count: int = 2

    def start(
        self,
        words: list[str],
        folder: Path,
        trace: str = "trace",
        faults: Mapping[int, str] | None = None,
        own: Mapping[int, list[str]] | None = None,
        place: Callable[[int], dict[str, str]] | None = None,
        stops: Mapping[int, tuple[str, int]] | None = None,
        **environ: str,
    ) -> list[Forked]:
        """Start a run in `folder`. The output of all ranks is appended to `folder`/log.txt.

        `faults`: the fault of a rank (injected.py). `own`: further words of a rank. `place`: the
        environment variables that number a rank; None means those of the launcher. `stops`: where a rank stops
        itself (Forked).
        """
        port, started = str(free_port()), []

        def of_launcher(rank: int) -> dict[str, str]:
            ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(self.count)}
            return {**ranks, PROCESSES: str(self.count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}

        for rank in range(self.count):
            one = {**(place or of_launcher)(rank), VARIABLE: (faults or {}).get(rank, ""), **environ}
            started.append(
                self.server.start(
                    [*words, *(own or {}).get(rank, ())],
                    folder,
                    f"{trace}-{rank}.jsonl",
                    stops=(stops or {}).get(rank),
                    **one,
                )
            )
        return started

    def run(self, words: list[str], folder: Path, trace: str = "trace", **given: object) -> list[int]:
        """start(), and the exit codes."""
        return [forked.wait() for forked in self.start(words, folder, trace, **given)]  # type: ignore[arg-type]
