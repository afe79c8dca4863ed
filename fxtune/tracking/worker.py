"""The process of a tracker: it follows metrics.jsonl and sends the tracker one row for each step.

Each tracker has a separate process, so its library cannot stop, slow or block training. To add a tracker, write a
class here and list it in `TRACKERS`. Add its package to system/machine/facts.py and its key to tracker.py.

The input has one JSON object per line: first `{"tracker", "options", "argv", "pid", "history"}`, at the end
`{"finish": exit_code, "summary": {...}}`. If the input ends without "finish", the training process died, and the run
is marked as failed.

The output has one JSON object per line: `{"imported": true}`, then `{"ready": {"url", "last"}}` or `{"failed":
reason}`, later perhaps `{"lost": reason}`, at the end `{"done": true}` or `{"late": reason}`.

This file imports nothing of fxtune: it runs by its path, whatever the working directory.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import queue
import re
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from typing import IO, Any

from filelock import FileLock

STEP, TIME = "train/step", "_timestamp"
HISTORY = "metrics.jsonl"
POLL = 0.5  # seconds between two reads of metrics.jsonl
GRACE = 3.0  # seconds that a library may take beyond finish_timeout before the process ends itself
CHECK = 5.0  # seconds between two checks of the library
REFUSED = re.compile(r"[^\w\-. :/]")  # what MLflow refuses in names
GOES_ON = 75  # the exit code of a run that was stopped by a signal and will be resumed


class Client:
    """A run in a tracker. If the tracker does not know the run's id, the run is new. Arguments: the imported library,
    the run's `id`, `name` and `config`, `dir`, `mode`, and the tracker's options. Every error becomes a message."""

    title = module = package = ""
    """The tracker's name in messages, the module to import, and the package that pip installs."""
    environment: dict[str, str] = {}  # variables that keep the library from reporting to its makers
    last, url = -1, ""
    """The last step that the tracker has, and the run's address for the user. Only later rows are logged."""

    def log(self, row: dict[str, Any]) -> None:
        """Log the figures and texts of one step, with STEP and TIME (seconds since 1970)."""

    def flush(self) -> None:
        """Send the rows that one read of metrics.jsonl gave."""

    def check(self) -> None:
        """Raise OSError if the library lost rows that it accepted."""

    def finish(self, exit_code: int, summary: dict[str, Any]) -> None:
        """Send what is left, and close the run."""


class Wandb(Client):
    title, module, package = "W&B", "wandb", "wandb"
    # Error reports to W&B's makers would contain more than a run's metrics, and there may be no network for them.
    environment = {"WANDB_ERROR_REPORTING": "false"}

    def __init__(self, wandb: Any, mode: str, init_timeout: float, finish_timeout: float, **init: Any) -> None:
        settings: dict[str, Any] = dict(init_timeout=init_timeout, finish_timeout=finish_timeout, silent=True)
        settings |= dict(
            console="off", disable_job_creation=True, x_stats_pid=os.getppid(), finish_timeout_raises=True
        )
        known = {key: value for key, value in settings.items() if key in wandb.Settings.model_fields}
        # An offline run has all rows. Its upload must start at row 0 of the server's history; `resume` would append.
        init |= dict(mode=mode, resume="allow" if mode == "online" else None, allow_val_change=True)
        self._run = run = wandb.init(settings=wandb.Settings(**known), **init)
        run.define_metric(STEP)
        run.define_metric("*", step_metric=STEP)
        self.last = run.starting_step - 1 if run.resumed else -1
        self.url = "" if run.offline else run.url

    def log(self, row: dict[str, Any]) -> None:
        self._run.log(row, step=row[STEP], commit=True)

    def check(self) -> None:
        """W&B's service may give up uploading the history. run.log() and run.finish() do not report this.

        The service's log reports it (wandb 0.22 to 0.31), as a JSON object with level ERROR and a message that starts
        with `filestream:`. Requests that the service retries are not logged as errors.
        """
        log = self._run.settings.log_internal
        with contextlib.suppress(FileNotFoundError), open(log, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if '"level":"ERROR' in line and '"msg":"filestream:' in line:
                    with contextlib.suppress(ValueError):
                        raise OSError(str(json.loads(line)["msg"]))

    def finish(self, exit_code: int, summary: dict[str, Any]) -> None:
        self._run.summary.update(summary)
        self._run.finish(exit_code=exit_code)


class TensorBoard(Client):
    """Each session writes all rows anew. TensorBoard drops rows of earlier files from the new file's first step on."""

    title, module, package = "TensorBoard", "tensorboard", "tensorboard"

    def __init__(self, _: Any, dir: str, **__: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._writer = Event, EventFileWriter(os.path.join(dir, "tensorboard"), flush_secs=10)
        self._writer.add_event(Event(wall_time=time.time(), session_log=SessionLog(status=SessionLog.START)))

    def log(self, row: dict[str, Any]) -> None:
        figures = [{"tag": name, "simple_value": value} for name, value in _numbers(row)]
        self._writer.add_event(self._event(step=row[STEP], wall_time=row[TIME], summary={"value": figures}))

    def finish(self, exit_code: int, summary: dict[str, Any]) -> None:
        self._writer.close()


class MLflow(Client):
    """The run is found by a tag with its id. MLflow's params cannot change, so the first session's params stay."""

    title, module, package = "MLflow", "mlflow", "mlflow-skinny"
    environment = {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3"}

    def __init__(self, mlflow: Any, experiment: str, id: str, name: str, config: Any, **_: Any) -> None:
        self._mlflow, self._client = mlflow, (client := mlflow.MlflowClient())
        if client.get_experiment_by_name(experiment) is None:
            with contextlib.suppress(mlflow.MlflowException):  # another run has just created it
                client.create_experiment(experiment)
        place = client.get_experiment_by_name(experiment).experiment_id
        found = client.search_runs([place], f"tags.`fxtune.id` = {id!r}", max_results=1)
        run = found[0] if found else client.create_run(place, run_name=name, tags={"fxtune.id": id})
        self._id, self._waiting = run.info.run_id, list[Any]()
        client.update_run(self._id, status="RUNNING")
        self.last = int(run.data.metrics.get(STEP, -1))
        self.url = f"run {self._id} of experiment {experiment} in {client.tracking_uri}."
        param = mlflow.entities.Param
        self._send("params", [param(key, text[:6000]) for key, text in _flat(config) if key not in run.data.params])

    def _send(self, kind: str, waiting: list[Any]) -> None:
        while waiting:
            self._client.log_batch(self._id, **{kind: waiting[:100]})  # MLflow's limit for params in a request
            del waiting[:100]

    def log(self, row: dict[str, Any]) -> None:
        figures = [*_numbers(row), (STEP, row[STEP])]  # the step comes last: it says that MLflow has the row
        metric, time = self._mlflow.entities.Metric, int(row[TIME] * 1000)
        self._waiting += [metric(REFUSED.sub("_", name), value, time, row[STEP]) for name, value in figures]

    def flush(self) -> None:
        with contextlib.suppress(self._mlflow.MlflowException):  # the server is away: the rows wait for finish()
            self._send("metrics", self._waiting)

    def finish(self, exit_code: int, summary: dict[str, Any]) -> None:
        self._send("metrics", self._waiting)
        self._client.set_terminated(self._id, {0: "FINISHED", GOES_ON: "KILLED"}.get(exit_code, "FAILED"))


class Trackio(Client):
    """Trackio's folder on this machine (TRACKIO_DIR). Trackio finds a run by its name, which ends in the run's id."""

    title, module, package = "Trackio", "trackio", "trackio"
    environment = {"HF_HUB_OFFLINE": "1"}

    def __init__(self, trackio: Any, project: str, id: str, name: str, config: Any, **_: Any) -> None:
        self._warned: list[str] = []  # Trackio warns of rows that it lost, and raises nothing
        warnings.showwarning = lambda message, *_, **__: self._warned.append(str(message))
        given = {"config": config, "embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        self._run = run = trackio.init(project, f"{name}-{id}", resume="allow", **given)
        last = trackio.SQLiteStorage.get_max_step_for_run(project, run.name, run.id)
        self.last = -1 if last is None else last
        self.url = f"run {run.name} in {trackio.TRACKIO_DIR}. To publish it: trackio sync --project {project}."

    def log(self, row: dict[str, Any]) -> None:
        self._run.log({name: value for name, value in row.items() if name != TIME}, step=row[STEP])

    def finish(self, exit_code: int, summary: dict[str, Any]) -> None:
        self._run.finish()

    def check(self) -> None:
        if lost := [text for text in self._warned if text.lower().startswith(("trackio", "could not flush"))]:
            raise OSError(lost[0])


TRACKERS: dict[str, Any] = {tracker.module: tracker for tracker in (Wandb, TensorBoard, MLflow, Trackio)}


def main() -> None:
    # A library's service inherits descriptors 0, 1 and 2. With our pipes it would hide the death of this process.
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
    tracker = TRACKERS[start["tracker"]]
    os.environ.update(tracker.environment)
    # Broad on purpose, here and below: whatever a library raises becomes one line for the training process.
    try:
        library = importlib.import_module(tracker.module)
        # Wait for the process of a killed run, which may still send its rows.
        _lock = FileLock(os.path.join(start["options"]["dir"], tracker.module, "lock")).acquire()
        if os.getppid() != start["pid"]:  # the training process has died meanwhile: the next one sends the rows
            os._exit(1)
        answer(imported=True)
        client = tracker(library, **start["options"])
    except Exception as error:  # noqa: BLE001
        answer(failed=_reason(error))
        os._exit(1)  # skips the library's exit hooks, which may wait for a server that never answers
    answer(ready={"url": client.url, "last": client.last})
    commands: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_read_commands, args=(lines, commands), daemon=True).start()
    try:
        command, row = _follow(client, start["history"], commands)
    except Exception as error:  # noqa: BLE001
        answer(lost=_reason(error))
        os._exit(1)
    watchdog = threading.Timer(start["options"]["finish_timeout"] + GRACE, os._exit, (1,))
    watchdog.daemon = True
    watchdog.start()
    try:
        exit_code, summary = command["finish"], command.get("summary") or {}
        if row and exit_code not in (None, GOES_ON):
            client.log(row if tracker is Wandb else summary | row)  # only W&B has a place for the summary
        client.finish(1 if exit_code is None else exit_code, summary)
        client.check()
    except Exception as error:  # noqa: BLE001
        answer(late=_reason(error))
        os._exit(1)
    answer(done=True)


def _numbers(row: dict[str, Any]) -> list[tuple[str, float]]:
    """The figures of a row, without its step and time."""
    return [(key, value) for key, value in row.items() if isinstance(value, (int, float)) and key not in (STEP, TIME)]


def _flat(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (key, text) of each value in nested dicts. A key is the names on the way to the value, joined by dots."""
    for name, value in config.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield REFUSED.sub("_", prefix + name), str(value)


def _read_commands(lines: IO[str], commands: queue.SimpleQueue[dict[str, Any]]) -> None:
    for line in lines:
        commands.put(json.loads(line))
    commands.put({"finish": None})


def _follow(
    client: Client, history: str, commands: queue.SimpleQueue[dict[str, Any]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Log the rows of steps after `client.last` when they are written, until the first command arrives.

    Returns the command and the last row. All lines of one step make one row, logged when the next step begins, because
    a sent row cannot be extended. If the training process died or will be resumed, the last row may be incomplete, and
    the next session sends it.
    """
    row: dict[str, Any] = {}
    command, checked = None, time.monotonic()
    with open(history, "rb") as stream:
        while command is None:
            with contextlib.suppress(queue.Empty):
                command = commands.get(timeout=POLL)
            for line in _new_lines(stream):
                if line[STEP] > client.last:
                    if row and line[STEP] != row[STEP]:
                        client.log(row)
                        row = {}
                    row = {**row, **line}
            client.flush()
            if time.monotonic() > checked + CHECK:
                checked = time.monotonic()
                client.check()
    return command, row


def _new_lines(stream: IO[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the complete lines from the current position to the end of the file, without figures that are null."""
    while (line := stream.readline()).endswith(b"\n"):
        with contextlib.suppress(ValueError, AttributeError, RecursionError):  # a full disk may leave broken lines
            values = {name: value for name, value in json.loads(line).items() if value is not None}
            if isinstance(values.get(STEP), int):
                values[TIME] = values.pop("time", None) or time.time()
                yield values
    stream.seek(-len(line), os.SEEK_CUR)


def _reason(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300].removesuffix(":")


if __name__ == "__main__":
    main()
