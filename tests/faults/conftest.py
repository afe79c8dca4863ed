"""Commands in this process, which cost no start of another one."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

HANGS = 600
"""Seconds after which a command counts as blocked."""


@pytest.fixture
def run_here(tmp_path: Path, monkeypatch, capfd) -> Callable[..., tuple[int, str]]:
    """A function that runs the words of a command line in `tmp_path`. Returns its exit code and its output in one line.

    TimeoutError if the command blocks, as at a pipe that nobody writes to.
    """
    from fxtune.cli.main import main

    def blocked(*_: object) -> None:
        raise TimeoutError(f"the command has not ended in {HANGS} s")

    def run(*words: str) -> tuple[int, str]:
        monkeypatch.chdir(tmp_path)
        capfd.readouterr()
        usual = signal.signal(signal.SIGALRM, blocked)
        signal.alarm(HANGS)
        try:
            code = main(list(words))
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, usual)
        return code, " ".join("".join(capfd.readouterr()).split())

    return run
