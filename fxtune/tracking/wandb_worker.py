"""The process that runs W&B: it follows metrics.jsonl and sends W&B one row for each step.

Input, one JSON object a line: first `{"argv", "settings", "init", "history"}`, at the end `{"finish": exit_code,
"summary": {...}}`. If the input ends without "finish", the training process died, and the run is marked as failed.

Output, one JSON object a line: `{"imported": true}`, then `{"ready": {"dir", "url", "last"}}` or `{"failed": reason}`,
later perhaps `{"lost": reason}`, at the end `{"done": true}` or `{"late": reason}`.

This file imports nothing of fxtune: it runs by its path, whatever the working directory.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import IO, Any

STEP = "train/step"
HISTORY = "metrics.jsonl"
POLL = 0.5  # seconds between two reads of metrics.jsonl
GRACE = 3.0  # seconds that wandb may take beyond its own finish_timeout before the process ends itself
CHECK = 5.0  # seconds between two checks of the service's log
GOES_ON = 75  # the exit code of a run that was stopped by a signal and will be resumed


def main() -> None:
    # W&B's service inherits descriptors 0, 1 and 2. Holding our pipes it would hide the death of this process.
    lines, answers = os.fdopen(os.dup(0), "r", encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)  # the training process decides when to end

    def answer(**message: Any) -> None:
        with contextlib.suppress(BrokenPipeError, ValueError):  # the training process is gone; finish the upload
            answers.write(json.dumps(message) + "\n")
            answers.flush()

    start = json.loads(lines.readline())
    sys.argv = start["argv"]  # W&B shows it as the run's command
    # Broad on purpose, here and below: whatever W&B raises becomes one line for the training process.
    try:
        import wandb

        answer(imported=True)
        known = wandb.Settings.model_fields
        settings = {key: value for key, value in start["settings"].items() if key in known}
        run = wandb.init(settings=wandb.Settings(**settings), **start["init"])
        run.define_metric(STEP)
        run.define_metric("*", step_metric=STEP)
        last = run.starting_step - 1 if run.resumed else -1
    except Exception as error:  # noqa: BLE001
        answer(failed=_reason(error))
        os._exit(1)  # skips wandb's exit hooks, which may wait for a server that never answers
    answer(ready={"dir": run.settings.sync_dir, "url": None if run.offline else run.url, "last": last})
    commands: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_read_commands, args=(lines, commands), daemon=True).start()
    try:
        command, last_row = _follow(run, start["history"], last, commands)
    except Exception as error:  # noqa: BLE001
        answer(lost=_reason(error))
        os._exit(1)
    watchdog = threading.Timer(start["settings"]["finish_timeout"] + GRACE, os._exit, (1,))
    watchdog.daemon = True
    watchdog.start()
    try:
        exit_code = command["finish"]
        run.summary.update(command.get("summary") or {})
        if exit_code not in (None, GOES_ON):
            last_row()
        run.finish(exit_code=1 if exit_code is None else exit_code)
        _require_uploaded(run)
    except Exception as error:  # noqa: BLE001
        answer(late=_reason(error))
        os._exit(1)
    answer(done=True)


def _read_commands(lines: IO[str], commands: queue.SimpleQueue[dict[str, Any]]) -> None:
    for line in lines:
        commands.put(json.loads(line))
    commands.put({"finish": None})


def _follow(
    run: Any, history: str, last: int, commands: queue.SimpleQueue[dict[str, Any]]
) -> tuple[dict[str, Any], Callable[[], None]]:
    """Send the rows of steps after `last` as they are written, until the first command.

    Returns the command and a function that sends the last row. All lines of one step make one row, sent when the next
    step begins, because a sent row cannot be extended. If the training process died or will be resumed, the last row
    may be incomplete, and the next session sends it.
    """
    row: dict[str, Any] = {}

    def send() -> None:
        if row:
            run.log(dict(row), step=row[STEP], commit=True)
            row.clear()

    command, checked = None, time.monotonic()
    with open(history, "rb") as stream:
        while command is None:
            with contextlib.suppress(queue.Empty):
                command = commands.get(timeout=POLL)
            for line in _new_lines(stream):
                if line[STEP] > last:
                    if row and line[STEP] != row[STEP]:
                        send()
                    row.update(line)
            if time.monotonic() > checked + CHECK:
                checked = time.monotonic()
                _require_uploaded(run)
    return command, send


def _new_lines(stream: IO[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the complete lines from the current position to the end of the file, without figures that are null."""
    while (line := stream.readline()).endswith(b"\n"):
        with contextlib.suppress(ValueError, AttributeError, RecursionError):  # a full disk leaves such lines
            values = {name: value for name, value in json.loads(line).items() if value is not None}
            if isinstance(values.get(STEP), int):
                values["_timestamp"] = values.pop("time", None) or time.time()
                yield values
    stream.seek(-len(line), os.SEEK_CUR)


def _require_uploaded(run: Any) -> None:
    """Raise OSError if W&B's service gave up uploading the history, which run.log() and run.finish() do not report.

    The service's log does (wandb 0.22 to 0.31), as a JSON object with level ERROR and a message that starts with
    `filestream:`. Requests that the service retries are not logged as errors.
    """
    with (
        contextlib.suppress(FileNotFoundError),
        open(run.settings.log_internal, encoding="utf-8", errors="replace") as log,
    ):
        for line in log:
            if '"level":"ERROR' in line and '"msg":"filestream:' in line:
                with contextlib.suppress(ValueError):
                    raise OSError(str(json.loads(line)["msg"]))


def _reason(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300].removesuffix(":")


if __name__ == "__main__":
    main()
