"""One trial: a process of its own that measures one setting, what became of it, and the cache that keeps the answers.

A trial may run out of memory, crash, hang or be refused; each of these is an answer. So it runs `fxtune bench` as a process:
what it leaves on the card goes with it, and no trial can end the search. Its processes (loaders, compilers) are a group of
their own, which is ended as a whole when the trial is over, at its time limit, and when the search is broken off. If the search
itself is killed, Linux kills the trial with it, and what the trial had started watches for that.

An answer is kept under what it depends on (the caller's `key`: card, model, data, packages, setting) in a file of its own,
written at one go, so that a search that was broken off finds all it knew.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import IO, Any, NoReturn

import fxtune
from fxtune.errors import ConfigError, HardwareError
from fxtune.system.atomic_files import replace_text
from fxtune.system.redact import redact_text

WARM_UP = 3
"""Steps before those that are measured; the first ones compile and fill caches."""
GRACE = 5.0
"""Seconds that a trial has to end when it is told to."""
TAIL = 4000
"""Characters of a failed trial's output that are looked at for the reason."""
PR_SET_PDEATHSIG = 1
"""linux/prctl.h"""


class Outcome(str, Enum):
    measured = "measured"
    refused = "refused"
    memory = "out of memory"
    crashed = "crashed"
    hung = "over its time limit"


@dataclass(frozen=True)
class TrialResult:
    """What became of one trial."""

    outcome: Outcome
    seconds: float
    """Of the process, from its start to its end."""
    tokens_per_second: float = 0.0
    peak: float = 0.0
    """GiB at most; of the GPU, or of the process where there is none."""
    losses: tuple[float, ...] = ()
    """nats a supervised token, of each step, those to warm up included; NaN where it was not finite."""
    waited: float = 1.0
    """Share of the time in which the loop stood still for its data."""
    reason: str = ""
    """Why there is no figure, in a line."""
    data: str = ""
    """The fingerprint of the data: losses can be compared within the same one."""
    cached: bool = False


class Cache:
    """Answers in files of a folder. `again`: none is read, new ones take the place of those that are there."""

    def __init__(self, folder: Path, again: bool = False) -> None:
        self.folder, self.again = folder, again
        self._mine: set[Path] = set()

    def find(self, key: Any, repeat: int = 0) -> TrialResult | None:
        """The answer to the trial that `key` (plain data) says all of; `repeat` tells measurements of the same one apart."""
        file = self._file(key, repeat)
        if self.again and file not in self._mine:
            return None
        try:
            found = json.loads(file.read_text())["answer"]
            return TrialResult(
                **{**found, "outcome": Outcome(found["outcome"]), "losses": tuple(found["losses"]), "cached": True}
            )
        except (OSError, ValueError, KeyError, TypeError):  # not there, or not whole: measured again
            return None

    def keep(self, key: Any, answer: TrialResult, repeat: int = 0) -> None:
        """A cache that cannot be written is none."""
        file = self._file(key, repeat)
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"answer": asdict(answer), "repeat": repeat, "key": key}, indent=1, default=str)
            replace_text(file, text, shared=True)
            self._mine.add(file)

    def _file(self, key: Any, repeat: int) -> Path:
        whole = json.dumps([key, repeat], sort_keys=True, default=str)
        return self.folder / f"{hashlib.sha256(whole.encode()).hexdigest()[:24]}.json"


def command(words: list[str], steps: int, file: Path) -> list[str]:
    """The process that measures `steps` steps of what `words` (recipe, groups, keys) say, and writes its figures to `file`."""
    return [
        sys.executable,
        "-m",
        "fxtune",
        "bench",
        *words,
        "--steps",
        str(steps),
        "--warm-up",
        str(WARM_UP),
        "--json",
        str(file),
    ]


def measure(words: list[str], steps: int, limit: float) -> TrialResult:
    """Run one trial for at most `limit` seconds. Any error of it is an answer; KeyboardInterrupt ends it and goes on up."""
    with tempfile.TemporaryDirectory(prefix="fxtune-tune-") as scratch:
        file = Path(scratch) / "figures.json"
        code, text, seconds = ended(command(words, steps, file), limit)
        if code is None:
            said = redact_text(_last(text)) or "it said nothing"
            return TrialResult(Outcome.hung, seconds, reason=f"no figures after {limit:.0f} s: {said}")
        if code == 0:
            return _read(file, seconds)
        return failed(code, text, seconds)


def ended(command: list[str], limit: float | None = None) -> tuple[int | None, str, float]:
    """Run a process for at most `limit` seconds, and end it and all that it started, whatever happens here.

    Returns its exit code (None: it was over the limit), the end of what it said, and the seconds that it took.
    """
    with tempfile.TemporaryFile() as out:
        path = os.pathsep.join(filter(None, [str(Path(fxtune.__file__).parents[1]), os.environ.get("PYTHONPATH")]))
        began = time.monotonic()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_us(),
            env={**os.environ, "PYTHONPATH": path},
        )
        code: int | None = None
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            return None, _tail(out), time.monotonic() - began  # before it says that it was ended
        finally:
            _end(process)
        return code, _tail(out), time.monotonic() - began


def failed(code: int, text: str, seconds: float) -> TrialResult:
    """The answer of a process that ended with `code` after it said `text`."""
    told = redact_text(" ".join(text.rpartition("fxtune: ")[2].split()) if "fxtune: " in text else _last(text))
    if "out of memory" in text or "OutOfMemoryError" in text or code == -signal.SIGKILL:
        return TrialResult(
            Outcome.memory, seconds, reason=told if code > 0 else "killed, most often for the host's memory"
        )
    if code in (ConfigError.exit_code, HardwareError.exit_code):
        return TrialResult(Outcome.refused, seconds, reason=told)
    how = f"ended by signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return TrialResult(Outcome.crashed, seconds, reason=f"{how}: {told or 'it said nothing'}")


def _read(file: Path, seconds: float) -> TrialResult:
    """The figures that `fxtune bench --json` wrote."""
    try:
        found = json.loads(file.read_text())
        losses = tuple(math.nan if loss is None else float(loss) for loss in found["losses"])
        return TrialResult(
            Outcome.measured,
            seconds,
            float(found["tokens_per_second"]),
            float(found["memory_gib"]),
            losses,
            float(found["data_wait"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        return TrialResult(
            Outcome.crashed, seconds, reason=f"wrote no figures that can be read ({type(error).__name__}: {error})"
        )


def _tail(out: IO[bytes]) -> str:
    """The end of a file that another process may still be writing to, and whose place stays as that one has it."""
    size = os.fstat(out.fileno()).st_size
    return os.pread(out.fileno(), TAIL, max(0, size - TAIL)).decode(errors="replace")


def _last(text: str) -> str:
    """The last line that says something; of a traceback that is the error."""
    lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the trial, asked first as by Ctrl-C so that it can put its files away, then killed; and all that it started."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # its group: start_new_session made it the leader of one
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE)


def _die_with_us() -> Callable[[], None] | None:
    """What a trial does before anything else: ask Linux to be killed when this process is."""
    if not sys.platform.startswith("linux"):
        return None
    libc, parent = ctypes.CDLL(None), os.getpid()

    def ask() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # killed before the line above
            os._exit(1)

    return ask


@contextmanager
def ended_in_order() -> Iterator[None]:
    """While a search runs, being told to end (SIGTERM, SIGHUP) unwinds it as Ctrl-C does, so that no trial is left behind."""

    def leave(number: int, _: Any) -> NoReturn:
        raise SystemExit(128 + number)

    numbers = [signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
    numbers = [
        number for number in numbers if signal.getsignal(number) is signal.SIG_DFL
    ]  # others are answered: signals.py
    before = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
