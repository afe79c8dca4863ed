"""Kills processes of a run of several ranks, as users start it, and checks what is left.

A run is a launcher (torch's elastic agent runs in it), the ranks that it starts, and what these start. All inherit a
mark in their environment, by which they are found even if their parents are dead.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from support.endings import Ending
from support.harness import start, wait_for
from support.killing import tail

MARK = "FXTUNE_TEST_MARK"
LIMIT = 60.0
"""Seconds in which all processes of a run must have ended after one of them was killed."""
VICTIMS = ("a rank", "a rank", "the launcher", "all")


def environment(pid: int) -> dict[str, str]:
    """The environment with which a process was started; empty if it is gone."""
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)


def marked(mark: str) -> dict[int, dict[str, str]]:
    """The environments of all running processes with this mark."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        around = environment(int(folder.name))
        with contextlib.suppress(OSError):
            ended = (folder / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
            if around.get(MARK) == mark and not ended:
                found[int(folder.name)] = around
    return found


def ranks_of(launcher: int, mark: str) -> dict[int, int]:
    """The process of each rank."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    known = marked(mark)
    return {int(known[int(child)]["RANK"]): int(child) for child in children if "RANK" in known.get(int(child), {})}


def port_is_free(port: int) -> bool:
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def steps_logged(folder: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return (folder / "run" / "metrics.jsonl").read_text().count('"train/loss"')
    return 0


@dataclass
class RankKill:
    """One kill, and what followed."""

    victim: str
    steps: int
    """Steps that were logged by then."""
    code: int
    """The launcher's exit code."""
    seconds: float
    """From the kill to the end of the last process."""
    messages: list[str]
    wrong: list[str] = field(default_factory=list)
    """What should not have been."""


def kill_once(words: list[str], folder: Path, draw: random.Random, seconds: float, steps: int) -> RankKill | None:
    """Start a run, kill one of its processes or all at a random moment, and see that all of it ends. `seconds`,
    `steps`: of an undisturbed run. None if the run ended before the kill."""
    mark, victim = uuid.uuid4().hex, draw.choice(VICTIMS)
    said = len(tail(folder, 10**7)) if (folder / "log.txt").exists() else 0
    before = steps_logged(folder)
    process = start(words, folder, **{MARK: mark})
    if draw.random() < 0.3:
        pause, wanted = draw.uniform(0.02, 0.6) * seconds, 0
    else:
        pause, wanted = draw.uniform(0.0, 0.15), draw.randint(min(before + 1, steps), steps)
    with contextlib.suppress(AssertionError):  # it has ended
        wait_for(lambda: steps_logged(folder) >= wanted, process)
    time.sleep(pause)
    known = marked(mark)
    ranks = ranks_of(process.pid, mark) if process.poll() is None else {}
    if process.poll() is not None:
        return None
    if victim == "a rank":
        if not ranks:
            victim = "the launcher"
        else:
            rank = draw.choice(sorted(ranks))
            victim = f"rank {rank}"
    chosen = {"the launcher": [process.pid], "all": [*known]}.get(victim) or [ranks[rank]]
    reached, at = steps_logged(folder), time.monotonic()
    for pid in chosen:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    code = process.wait(600)
    while (left := marked(mark)) and time.monotonic() - at < LIMIT:
        time.sleep(0.05)
    took = time.monotonic() - at
    messages = [line for line in tail(folder, 10**7)[said:].splitlines() if line.startswith("fxtune:")]
    found = RankKill(victim, reached, code, took, messages)
    ports = {int(around["MASTER_PORT"]) for around in known.values() if "MASTER_PORT" in around}
    for pid in left:
        found.wrong.append(f"process {pid} ran on: {Path(f'/proc/{pid}/cmdline').read_bytes()!r}")
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    found.wrong += [f"port {port} is held" for port in ports if not port_is_free(port)]
    if took > LIMIT:
        found.wrong.append(f"it took {took:.0f} s to end")
    if victim.startswith("rank") and code != 0 and (code != 7 or len(messages) != 1 or "Rank" not in messages[0]):
        found.wrong.append(f"exit code {code}, messages {messages}")
    return found


def finish(words: list[str], folder: Path) -> tuple[Ending, float]:
    """Run to the end, undisturbed. Returns the result, and how long it took."""
    began = time.monotonic()
    code = start(words, folder).wait(900)
    assert code == 0, tail(folder, 3000)
    return Ending.of(folder / "run", []), time.monotonic() - began
