"""A trial of a search: `fxtune bench` in a separate process, its result, and the cache of results.

A trial may run out of memory, crash, hang or be refused, and each of these is a result. Its process group, which
includes loader workers and compilers, is killed when the trial ends or reaches its time limit, or when the search is
interrupted. If the search itself is killed, Linux kills the trial.

The cache holds each result under a hash of everything that the result depends on. So an interrupted search can
continue.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import signal
import sys
import tempfile
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from fxtune.errors import ConfigError, HardwareError
from fxtune.system.files.atomic_files import add_cached, json_or_empty
from fxtune.system.process.process_group import run_process
from fxtune.system.terminal.redact import redact_text

WARM_UP = 3
"""Steps before the measured steps. The first steps compile code and fill caches."""


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
    losses: tuple[float, ...] = ()
    """The objective's mean loss of each step, warm-up included; NaN if the loss was not finite."""
    waited: float = 1.0
    reason: str = ""
    data: str = ""
    """Fingerprint of the data. Only losses with the same fingerprint are comparable."""
    cached: bool = False


class TrialCache:
    """Results of trials, in the JSON file `path`. `refresh`: ignore and replace earlier results."""

    def __init__(self, path: Path, refresh: bool = False) -> None:
        self.path, self.refresh = path, refresh

    def find(self, key: dict[str, Any]) -> TrialResult | None:
        """The result of the trial that `key`, plain data, describes; None if the result is missing or damaged."""
        if self.refresh:
            return None
        try:
            found = json_or_empty(self.path)[_digest(key)]
            known = {"outcome": Outcome(found["outcome"]), "losses": tuple(found["losses"]), "cached": True}
            return TrialResult(**{**found, **known})
        except (ValueError, KeyError, TypeError):
            return None

    def keep(self, key: dict[str, Any], result: TrialResult) -> None:
        add_cached(self.path, {_digest(key): asdict(result)})


def _digest(key: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:24]


def measure(overrides: list[str], steps: int, limit: float) -> TrialResult:
    """Run one trial for at most `limit` seconds. KeyboardInterrupt ends the trial and is raised again."""
    return bench(overrides, steps, WARM_UP, limit)[0]


def bench(
    overrides: list[str], steps: int, warm_up: int, limit: float | None = None
) -> tuple[TrialResult, dict[str, Any]]:
    """Run `fxtune bench` in a separate process. Returns the result, and the figures (empty if the process failed)."""
    with tempfile.TemporaryDirectory(prefix="fxtune-trial-") as scratch:
        file = Path(scratch) / "measured.json"
        code, output, seconds = run_process(bench_command(overrides, steps, warm_up, file), limit)
        if code is None:
            said = redact_text(_last_line(output)) or "it printed nothing"
            return TrialResult(Outcome.hung, seconds, reason=f"no result after {limit:.0f} s: {said}"), {}
        if code:
            return failure(code, output, seconds), {}
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            speed, peak, waited = (float(found[key]) for key in ("tokens_per_second", "memory_gib", "data_wait"))
            losses = tuple(math.nan if loss is None else float(loss) for loss in found["losses"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = f"its measurements cannot be read ({type(error).__name__}: {error})"
            return TrialResult(Outcome.crashed, seconds, reason=reason), {}
        return TrialResult(Outcome.measured, seconds, speed, peak, losses, waited), found


def bench_command(overrides: list[str], steps: int, warm_up: int, file: Path) -> list[str]:
    options = ["--steps", str(steps), "--warm-up", str(warm_up), "--json", str(file)]
    return [sys.executable, "-m", "fxtune", "bench", *overrides, *options]


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


def _last_line(text: str) -> str:
    lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines() if line.strip()]
    return lines[-1] if lines else ""
