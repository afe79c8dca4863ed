"""A trial of a search: `fxtune bench` in a process of its own, its result, and the cache of results.

A trial may run out of memory, crash, hang or be refused, and each of these is a result. As a separate process, it
frees the GPU when it ends, and its failure does not end the search. The trial and its children (loader workers,
compilers) form one process group, which is killed when the trial ends, reaches its time limit, or the search is
interrupted. If the search itself is killed, Linux kills the trial.

The cache holds one file per result, named by a hash of everything that the result depends on. After an interruption,
the next search finds all earlier results there.
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
"""Steps before the measured ones; the first steps compile and fill caches."""
GRACE = 5.0
"""Seconds between asking a trial to end and killing it."""
TAIL = 4000
"""Characters at the end of a failed trial's output that are searched for the reason."""
PR_SET_PDEATHSIG = 1
"""From linux/prctl.h."""


class Outcome(str, Enum):
    measured = "measured"
    refused = "refused"
    memory = "out of memory"
    crashed = "crashed"
    hung = "over its time limit"


@dataclass(frozen=True)
class TrialResult:
    outcome: Outcome
    seconds: float
    """Run time of the process."""
    tokens_per_second: float = 0.0
    peak: float = 0.0
    """Peak memory in GiB: of the GPU, or of the process if there is no GPU."""
    losses: tuple[float, ...] = ()
    """Nats per supervised token of each step, warm-up included; NaN if the loss was not finite."""
    waited: float = 1.0
    """Share of the time that the loop waited for data."""
    reason: str = ""
    """Why there is no measurement, in one line."""
    data: str = ""
    """Fingerprint of the data. Losses are comparable only if it is the same."""
    cached: bool = False


class TrialCache:
    """Results in JSON files of `folder`. `refresh`: ignores what is there and replaces it."""

    def __init__(self, folder: Path, refresh: bool = False) -> None:
        self.folder, self.refresh = folder, refresh

    def find(self, key: dict[str, Any]) -> TrialResult | None:
        """The result of the trial that `key` describes, as plain data; None if it is missing or damaged."""
        if self.refresh:
            return None
        try:
            found = json.loads(self._file(key).read_text())["result"]
            known = {"outcome": Outcome(found["outcome"]), "losses": tuple(found["losses"]), "cached": True}
            return TrialResult(**{**found, **known})
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def keep(self, key: dict[str, Any], result: TrialResult) -> None:
        with suppress(OSError):  # the search goes on without a cache
            self.folder.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"result": asdict(result), "key": key}, indent=1, default=str)
            replace_text(self._file(key), text, shared=True)

    def _file(self, key: dict[str, Any]) -> Path:
        text = json.dumps(key, sort_keys=True, default=str)
        return self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


def measure(overrides: list[str], steps: int, limit: float) -> TrialResult:
    """Run one trial for at most `limit` seconds. KeyboardInterrupt ends the trial and is raised again."""
    return bench(overrides, steps, WARM_UP, limit)[0]


def bench(
    overrides: list[str], steps: int, warm_up: int, limit: float | None = None
) -> tuple[TrialResult, dict[str, Any]]:
    """Run `fxtune bench` in a process of its own. Returns its result, and the measurements it wrote (empty if it
    failed)."""
    with tempfile.TemporaryDirectory(prefix="fxtune-trial-") as scratch:
        file = Path(scratch) / "measured.json"
        code, output, seconds = run_process(bench_command(overrides, steps, warm_up, file), limit)
        if code is None:
            said = redact_text(_last_line(output)) or "it printed nothing"
            return TrialResult(Outcome.hung, seconds, reason=f"no result after {limit:.0f} s: {said}"), {}
        if code:
            return failure(code, output, seconds), {}
        try:
            found = json.loads(file.read_text())
            speed, peak, waited = (float(found[key]) for key in ("tokens_per_second", "memory_gib", "data_wait"))
            losses = tuple(math.nan if loss is None else float(loss) for loss in found["losses"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = f"its measurements cannot be read ({type(error).__name__}: {error})"
            return TrialResult(Outcome.crashed, seconds, reason=reason), {}
        return TrialResult(Outcome.measured, seconds, speed, peak, losses, waited), found


def bench_command(overrides: list[str], steps: int, warm_up: int, file: Path) -> list[str]:
    options = ["--steps", str(steps), "--warm-up", str(warm_up), "--json", str(file)]
    return [sys.executable, "-m", "fxtune", "bench", *overrides, *options]


def run_process(command: list[str], limit: float | None = None) -> tuple[int | None, str, float]:
    """Run a process for at most `limit` seconds, then kill its process group, also if an exception is raised here.

    Returns the exit code (None: it reached the limit), the end of its output, and its run time in seconds.
    """
    with tempfile.TemporaryFile() as output:
        path = os.pathsep.join(filter(None, [str(Path(fxtune.__file__).parents[1]), os.environ.get("PYTHONPATH")]))
        start = time.monotonic()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent(),
            env={**os.environ, "PYTHONPATH": path},
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            return None, _tail(output), time.monotonic() - start  # read before it reports its own interrupt
        finally:
            _end(process)
        return code, _tail(output), time.monotonic() - start


def failure(code: int, output: str, seconds: float) -> TrialResult:
    """The result of a process that printed `output` and ended with the exit code `code`, which is not 0."""
    reason = " ".join(output.rpartition("fxtune: ")[2].split()) if "fxtune: " in output else _last_line(output)
    reason = redact_text(reason)
    if "out of memory" in output or "OutOfMemoryError" in output or code == -signal.SIGKILL:
        killed = "killed, most likely because the host ran out of memory"
        return TrialResult(Outcome.memory, seconds, reason=reason if code > 0 else killed)
    if code in (ConfigError.exit_code, HardwareError.exit_code):
        return TrialResult(Outcome.refused, seconds, reason=reason)
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return TrialResult(Outcome.crashed, seconds, reason=f"{how}: {reason or 'it printed nothing'}")


def _tail(output: IO[bytes]) -> str:
    """The end of a file that another process may still write to; pread leaves the shared file position alone."""
    size = os.fstat(output.fileno()).st_size
    return os.pread(output.fileno(), TAIL, max(0, size - TAIL)).decode(errors="replace")


def _last_line(text: str) -> str:
    """The last line that is not blank, without colours; of a traceback, the error."""
    lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the trial by SIGINT, so that it removes its temporary files, then kill its process group."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # start_new_session made it the leader of a group
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE)


def _die_with_parent() -> Callable[[], None] | None:
    """The function that the child runs before exec, so that Linux kills it when this process
    dies; None on other systems."""
    if not sys.platform.startswith("linux"):
        return None
    libc, parent = ctypes.CDLL(None), os.getpid()

    def set_parent_death_signal() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before the line above
            os._exit(1)

    return set_parent_death_signal


@contextmanager
def unwind_on_signal() -> Iterator[None]:
    """Make SIGTERM and SIGHUP raise SystemExit, as Ctrl-C raises KeyboardInterrupt, so that no trial stays behind."""

    def leave(number: int, _: Any) -> NoReturn:
        raise SystemExit(128 + number)

    # A signal that already has another handler keeps it: see system/signals.py.
    free = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    for number in free:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in free:
            signal.signal(number, signal.SIG_DFL)
