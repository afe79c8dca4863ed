"""Runs as users start them (`python -m fxtune`, a launcher and its ranks, a shell in a terminal) that stop themselves
before a step. So a test that signals or kills such a run there may take any time.

    process = start(words, folder, **stops_before(5, folder))
    stopped_below(process)  # it has taken four steps
    assert kill(process) == -9

Runs of ForkServer stop themselves at any phase (`stops` of killing.py).
"""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

from support.harness import KEPT, wait_for
from support.processes import children, stopped

STEP = "FXTUNE_TEST_STOP_BEFORE"
CODE = f'''
"""Python runs a file sitecustomize.py when it starts. This one waits for the import of the module that takes steps."""

import importlib.util
import os
import signal
import sys


class Finder:
    @classmethod
    def find_spec(cls, name, path, target=None):
        if name != "fxtune.training.steps":
            return None
        sys.meta_path.remove(cls)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (execute(module), stop_before_step(module.Steps))
        return spec


def stop_before_step(steps):
    take, left = steps.take, [int(os.environ["{STEP}"])]

    def counted(self, step, lr):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        return take(self, step, lr)

    steps.take = counted


if os.environ.get("RANK", "0") == "0":
    sys.meta_path.insert(0, Finder)
'''


def stops_before(step: int, folder: Path) -> dict[str, str]:
    """The environment in which a run stops itself before the n-th step that it takes, counted from 1. Of several ranks,
    rank 0 stops, and the others wait for it. A file is written to `folder`."""
    place = folder / "stops"
    place.mkdir(parents=True, exist_ok=True)
    (place / "sitecustomize.py").write_text(CODE)
    return {STEP: str(step), "PYTHONPATH": os.pathsep.join([str(place), KEPT["PYTHONPATH"]])}


def stopped_below(process: subprocess.Popen[bytes]) -> list[int]:
    """Wait until the run that `process` is, or has started, has stopped itself. Returns the stopped processes.

    AssertionError if the run ends before.
    """
    return list(wait_for(lambda: [pid for pid in family(process.pid) if stopped(pid)], process))


def family(pid: int) -> list[int]:
    """A process, its children, their children and so on. A launcher gives its ranks process groups of their own."""
    return [pid, *(each for child in children(pid) for each in family(child))]


def resume(pids: list[int]) -> None:
    """Let the processes of stopped_below() go on, with the signals that came meanwhile."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
