"""A process of a sweep that trains one configuration after another on one card. It loads the libraries once.

The sweep writes a line of JSON for each job to its standard input and gets a line with the result. What a run prints
goes to a file. A run that fails ends that job; a process that dies is replaced by a new one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fxtune.errors import Stopped, UserError, first_line
from fxtune.system.process_group import GRACE, end_process, start_process

TRAIN, PLAN = "train", "plan"
BUG = "bug"
DIED = "died"


class SweepWorker:
    """The handle of one such process. `environment`: which card it sees, and how many threads it has."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = dict(environment)
        self.process = self._start()
        self.busy = False

    def _start(self) -> subprocess.Popen[bytes]:
        return start_process(
            [sys.executable, "-m", "fxtune.tuning.sweep_worker"],
            self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def send(self, call: str, overrides: list[str], log: Path) -> None:
        """Give it a job: TRAIN, or PLAN, which only reads the data. What it prints is added to `log`."""
        if self.process.poll() is not None:
            end_process(self.process)
            self.process = self._start()
        assert self.process.stdin
        self.busy = True
        with suppress(OSError):  # it died; receive() says so
            self.process.stdin.write((json.dumps([call, overrides, str(log)]) + "\n").encode())
            self.process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        """The result of the job. Waits for it. {"error": message, "kind": class of the error} if it failed."""
        assert self.process.stdout
        line = self.process.stdout.readline()
        self.busy = False
        with suppress(ValueError):
            return dict(json.loads(line))
        code = self.process.wait()
        name = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        killed = ", most likely because the host ran out of memory" if code == -signal.SIGKILL else ""
        return {"error": f"its process ended with {name}{killed}", "kind": DIED}

    def fileno(self) -> int:
        """For select(): readable once receive() does not wait."""
        assert self.process.stdout
        return self.process.stdout.fileno()

    def interrupt(self) -> None:
        """Have it save the state of its run. receive() then returns {"stopped": ...}."""
        with suppress(OSError):
            self.process.send_signal(signal.SIGTERM)

    def end(self) -> None:
        """End the process; one that has no job ends by itself."""
        assert self.process.stdin
        with suppress(OSError):
            self.process.stdin.close()
        if not self.busy:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(GRACE)
        end_process(self.process)


def main() -> None:
    """Run by the process: take jobs until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
    from fxtune.training import trainer  # noqa: F401  here, while the sweep still prepares

    for line in sys.stdin:
        call, overrides, log = json.loads(line)
        with open(log, "a") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        answer = _answer(call, overrides)
        sys.stdout.flush()
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        if "stopped" in answer:
            return


def _answer(call: str, overrides: list[str]) -> dict[str, Any]:
    from fxtune.system.oom import process_out_of_memory
    from fxtune.system.redact import redact_text

    try:
        return {TRAIN: _train, PLAN: _plan}[call](overrides)
    except Stopped as stop:
        return {"stopped": stop.outcome}
    except UserError as error:
        print(f"fxtune: {redact_text(str(error))}", file=sys.stderr)
        return {"error": redact_text(str(error)), "kind": type(error).__name__}
    except Exception as error:  # noqa: BLE001  one configuration's bug must not end the others
        if isinstance(error, (MemoryError, RuntimeError)) and (found := process_out_of_memory(error)):
            return {"error": redact_text(str(found)), "kind": type(found).__name__}
        traceback.print_exc()
        return {"error": redact_text(first_line(error)), "kind": BUG}


def _train(overrides: list[str]) -> dict[str, Any]:
    from fxtune.config.compose import load
    from fxtune.training import trainer

    return {"figures": trainer.run(load(overrides))}


def _plan(overrides: list[str]) -> dict[str, Any]:
    """How many steps a run takes."""
    from fxtune.config.compose import load
    from fxtune.training.builder import RunBuilder

    _, data = RunBuilder(load(overrides)).read()
    return {"steps": data.training.steps}


if __name__ == "__main__":
    main()
