"""A terminal that closes: its runs save and end like after a SIGTERM, or go on without output where SIGHUP is ignored."""

from __future__ import annotations

import fcntl
import os
import pty
import shlex
import signal
import subprocess
import sys
import termios
import threading
from pathlib import Path

import pytest
from support.harness import STARTED, command, run, user_environment, wait_for
from support.stopping import resume, stopped_below, stops_before

RANKS = {1: (), 2: ("run.gpus=2", "run.device=cpu")}


class Terminal:
    """A program in a terminal of its own, whose session it leads. `close()` closes the terminal as a window does."""

    def __init__(self, argv: list[str], folder: Path, ignores: bool = False, **environ: str):
        self.master, slave = pty.openpty()

        def take_terminal() -> None:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
            signal.signal(signal.SIGHUP, signal.SIG_IGN if ignores else signal.SIG_DFL)

        self.process = subprocess.Popen(
            argv,
            cwd=folder,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=user_environment(TERM="xterm-256color", **environ),
            start_new_session=True,
            preexec_fn=take_terminal,
        )
        STARTED.append(self.process)
        os.close(slave)
        self.seen, self._over = b"", threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        os.set_blocking(self.master, False)
        while not self._over.wait(0.02):
            try:
                self.seen += os.read(self.master, 65536)
            except BlockingIOError:
                continue
            except OSError:  # the program has closed it
                return

    def close(self) -> None:
        self._over.set()
        self._reader.join()
        os.close(self.master)


def words(folder: Path, ranks: int, *more: str) -> list[str]:
    """A run of 36 steps whose display redraws a line."""
    keys = ("train.epochs=3", "checkpoint.every=0", "tracking.display=auto")
    return command(folder, *keys, *RANKS[ranks], *more)


def start(folder: Path, ranks: int, shell: bool = False, ignores: bool = False) -> tuple[Terminal, list[int]]:
    """A run in a terminal that has taken a few steps, and its processes that have stopped themselves there. `shell`: a
    shell has started it. Its workers are in the group that the terminal signals, too."""
    argv = [sys.executable, "-m", "fxtune", *words(folder, ranks, *["loader.num_workers=2"] * shell)]
    if shell:  # the first shell leads the session; the second writes the exit code and survives
        argv = ["sh", "-c", f"( trap : HUP; {shlex.join(argv)}; echo $? > code )\ntrue"]
    terminal = Terminal(argv, folder, ignores, **stops_before(5, folder))
    return terminal, stopped_below(terminal.process)


def adapter(folder: Path) -> bytes:
    return (folder / "run" / "adapter" / "adapter_model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("ranks", "shell"),
    [
        pytest.param(1, False, marks=pytest.mark.vital),
        pytest.param(1, True, marks=pytest.mark.slow),
        pytest.param(2, False, marks=pytest.mark.slow),
        pytest.param(2, True, marks=pytest.mark.slow),
    ],
)
def test_closed_terminal_saves_the_run_and_the_same_command_ends_with_the_same_bits(tmp_path, ranks, shell):
    folder, whole = tmp_path / "closed", tmp_path / "whole"
    folder.mkdir(), whole.mkdir()
    terminal, stopped = start(folder, ranks, shell)
    terminal.close()
    resume(stopped)
    code = terminal.process.wait(600)
    if shell:
        assert code == -signal.SIGHUP
        wait_for(lambda: (folder / "code").exists() and (folder / "code").read_text())
        code = int((folder / "code").read_text())
    assert code == 75, terminal.seen
    assert not (folder / "run" / "result.json").exists()
    assert list(folder.glob("run/checkpoints/step-*"))
    resumed = run(words(folder, ranks, *["loader.num_workers=2"] * shell), folder)
    assert resumed.code == 0, resumed.text
    assert "Resuming" in resumed.text
    undisturbed = run(words(whole, ranks), whole)
    assert undisturbed.code == 0, undisturbed.text
    assert adapter(folder) == adapter(whole)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKS)
def test_run_that_ignores_the_hangup_trains_to_the_end_without_its_terminal(tmp_path, ranks):
    terminal, stopped = start(tmp_path, ranks, ignores=True)
    terminal.close()
    resume(stopped)
    assert terminal.process.wait(600) == 0, terminal.seen
    assert (tmp_path / "run" / "result.json").exists()


@pytest.mark.slow
def test_hangup_by_a_live_terminal_is_told_there(tmp_path):
    terminal, stopped = start(tmp_path, 1)
    os.kill(terminal.process.pid, signal.SIGHUP)
    resume(stopped)
    assert terminal.process.wait(600) == 75
    wait_for(lambda: b"SIGHUP: saved after step" in terminal.seen)
    terminal.close()
