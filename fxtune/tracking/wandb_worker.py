"""The process that W&B runs in: it reads what wandb_link.py writes, one JSON object a line, and answers likewise.

In: first `{"argv", "settings", "init"}`, then any of `{"log": {...}}`, `{"summary": {...}}`, `{"finish": exit_code}`.
Out: `{"imported": true}`, then `{"ready": {"dir", "url", "last"}}` or `{"failed": reason}`, later `{"lost": reason}`, last
`{"done": true}` or `{"late": reason}`. End of input without "finish": the training process died; the run is marked failed.

Nothing of fxtune is imported here: the file runs by its path, whatever the working directory.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from typing import IO, Any

STEP = "train/step"
GRACE = 3.0  # seconds that wandb may take beyond its own finish_timeout before the process ends itself
LOOK = 5.0  # seconds between two looks at whether W&B's service gave the upload up
GOES_ON = 75  # the exit code of a run that was told to stop and will be started again


def main() -> None:
    # W&B's service inherits 0, 1 and 2. Were it to hold our pipes, their other end would not see us die.
    lines, answers = os.fdopen(os.dup(0), "r", encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)  # the training process decides when to end; the end of input tells us

    def answer(**message: Any) -> None:
        try:
            answers.write(json.dumps(message) + "\n")
            answers.flush()
        except (BrokenPipeError, ValueError):
            pass  # nobody listens any more; go on to the end of input

    start = json.loads(lines.readline())
    sys.argv = start["argv"]  # what W&B shows as the run's command
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
        os._exit(1)  # not through wandb's exit hooks, which may wait for a server that never answers
    answer(ready={"dir": run.settings.sync_dir, "url": None if run.offline else run.url, "last": last})
    _serve(run, lines, answer, last, start["settings"]["finish_timeout"])


def _serve(run: Any, lines: IO[str], answer: Any, last: int, limit: float) -> None:
    """Hand rows to W&B, each whole: those of one step are one row, handed over when the next step's begins.

    A row that the server has cannot be added to. So one that may not be whole, when the training process died or will go on,
    is not handed over: the session that goes on has it in its replay.
    """
    row: dict[str, Any] = {}
    exit_code = None
    lost = False
    looked = time.monotonic()

    def hand_over() -> None:
        if row:
            run.log(dict(row), step=row[STEP], commit=True)
            row.clear()

    for line in lines:
        message = json.loads(line)
        if lost:
            continue
        try:
            if "finish" in message:
                exit_code = message["finish"]
                break
            if "summary" in message:
                run.summary.update(message["summary"])
            elif message["log"][STEP] > last:
                if row and message["log"][STEP] != row[STEP]:
                    hand_over()
                row.update(message["log"])
            if time.monotonic() > looked + LOOK:
                looked = time.monotonic()
                if refusal := _gave_up(run):
                    raise OSError(refusal)
        except Exception as error:  # noqa: BLE001
            lost = True
            answer(lost=_reason(error))
    watchdog = threading.Timer(limit + GRACE, os._exit, (1,))
    watchdog.daemon = True
    watchdog.start()
    try:
        if exit_code not in (None, GOES_ON):
            hand_over()
        run.finish(exit_code=1 if exit_code is None else exit_code)
        if refusal := _gave_up(run):
            raise OSError(refusal)
    except Exception as error:  # noqa: BLE001
        answer(late=_reason(error))
        os._exit(1)
    answer(done=True)


def _gave_up(run: Any) -> str | None:
    """Why W&B's service does not have all of the history on the server, for all that it tells: run.log() and run.finish() go on
    as if it had. A request that it repeats is no reason.

    Its own log says so, as of wandb 0.22 to 0.31: one JSON object a line, an error of the part that streams the history.
    """
    with contextlib.suppress(OSError), open(run.settings.log_internal, encoding="utf-8", errors="replace") as log:
        for line in log:
            if '"level":"ERROR' in line and '"msg":"filestream:' in line:
                with contextlib.suppress(ValueError):
                    return str(json.loads(line)["msg"])
    return None


def _reason(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300].removesuffix(":")


if __name__ == "__main__":
    main()
