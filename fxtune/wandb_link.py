"""Both ends of the line to W&B: the feed in the training process, and the process of its own that it feeds.

W&B is a network client with threads, exit hooks and a service process. In the training process a dead network, a killed
service or an upload that hangs would block a step or the exit, or raise from a hook. Here it owns a process: `WandbLink`
starts this very file, writes one JSON object a line to its input and reads its answers. The worst that can happen is that
this process is killed. It costs one Python interpreter (about 100 MB of memory) and no time in the loop.

In: first `{"argv", "settings", "init"}`, then any of `{"log": {...}}`, `{"summary": {...}}`, `{"finish": exit_code}`.
Out: `{"imported": true}`, then `{"ready": {"dir", "url"}}` or `{"failed": reason}`, later `{"lost": reason}`, last
`{"done": true}` or `{"late": reason}`. End of input without "finish": the training process died; the run is marked failed.

Nothing of fxtune is imported here: the file runs by its path, whatever the working directory.
"""

from __future__ import annotations

import contextlib
import json
import netrc
import os
import queue
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

STEP = "train/step"
FINISH_TIMEOUT = 30.0  # seconds that the end of a run may wait for W&B's last upload
START_TIMEOUT = 30.0  # seconds for a Python that imports wandb, on a slow disk; nobody waits for it but the feeding thread
QUEUED = 20_000  # messages kept while W&B starts or stalls
GRACE = 5.0  # seconds that wandb may take beyond its own finish_timeout before its process ends itself
PROGRAM = Path(__file__)


class WandbLink:
    """Feeds the W&B process from a thread, restarts it offline when the server does not answer, and ends it in time."""

    def __init__(self, init: dict[str, Any], run_dir: Path, argv: list[str], online: bool, init_timeout: float,
                 notes: queue.SimpleQueue[str]) -> None:
        """`init`: arguments of wandb.init. `argv`: the command to show, free of secrets. `notes` gets the messages."""
        self._init = {**init, "dir": str(run_dir)}
        self._run_dir = run_dir
        self._argv = argv
        self._notes = notes
        self._modes = ("online", "offline") if online else ("offline",)
        self._init_timeout = init_timeout
        self._settings = {"init_timeout": init_timeout, "finish_timeout": FINISH_TIMEOUT - GRACE,
                          "finish_timeout_raises": True, "silent": True, "console": "off", "x_stats_pid": os.getpid(),
                          "disable_job_creation": True}
        self._queue: queue.Queue[dict[str, Any]] = queue.Queue(QUEUED)
        self._full = False
        self._over = False
        self._step = 0
        self._process: subprocess.Popen[str] | None = None
        self._folder: str | None = None
        self._thread = threading.Thread(target=self._run, name="wandb-feed", daemon=True)
        self._thread.start()

    def put(self, message: dict[str, Any], step: int) -> None:
        self._step = step
        if self._over:
            return
        try:
            self._queue.put_nowait(message)
        except queue.Full:
            if not self._full:
                self._notes.put(f"W&B does not keep up: what it misses from step {step} on is in metrics.jsonl")
            self._full = True

    def finish(self, exit_code: int) -> None:
        deadline = time.monotonic() + self._init_timeout + FINISH_TIMEOUT
        try:
            self._queue.put({"finish": exit_code}, timeout=1)
        except queue.Full:
            deadline = 0.0  # it has not read for 20,000 messages and will not read this one
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._over = True
            self._notes.put(f"W&B did not finish in time and was left behind.{self._how_to_sync()}")
            if self._process:
                self._process.kill()

    def _run(self) -> None:
        reasons: list[str] = []
        for mode in self._modes:
            answers: queue.Queue[dict[str, Any]] = queue.Queue()
            reason = self._start(mode, answers)
            if reason is None:
                if reasons:
                    self._notes.put(f"W&B did not take the run ({reasons[0]}). It goes on offline.{self._how_to_sync()}")
                self._feed(mode, answers)
                return
            reasons.append(reason)
            if self._over:
                return
        self._over = True
        self._notes.put(f"W&B could not start ({reasons[-1]}). Training goes on; all figures are in metrics.jsonl")

    def _start(self, mode: str, answers: queue.Queue[dict[str, Any]]) -> str | None:
        """Start the W&B process in `mode`; None once it is ready, else the reason."""
        folder = self._run_dir / "wandb"
        environment = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / "process.log").open("ab") as log:
                self._process = process = subprocess.Popen(
                    [sys.executable, "-P", str(PROGRAM)], stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE, stderr=log, env=environment, text=True, encoding="utf-8",
                    start_new_session=True)  # Ctrl-C in the terminal is for the training process alone
            threading.Thread(target=_listen, args=(process, answers), daemon=True).start()
            self._send({"argv": self._argv, "settings": self._settings,
                        "init": {**self._init, "mode": mode}})
            answer = answers.get(timeout=START_TIMEOUT)
            if "imported" in answer:
                answer = answers.get(timeout=self._init_timeout + 1)
        except OSError as error:
            return str(error)
        except queue.Empty:
            process.kill()
            return f"no answer in {self._init_timeout:g} s"
        if "ready" in answer:
            self._folder = answer["ready"]["dir"]
            if mode == "online":
                self._notes.put(f"W&B: {answer['ready']['url']}")
            return None
        process.kill()
        return str(answer.get("failed", f"its process ended; see {folder / 'process.log'}"))

    def _feed(self, mode: str, answers: queue.Queue[dict[str, Any]]) -> None:
        ending = False
        while not ending:
            message = self._queue.get()
            ending = "finish" in message
            with contextlib.suppress(OSError):  # the process is gone; the answers say so
                self._send(message)
            if not ending and not answers.empty():
                lost = answers.get()
                self._over = True
                reason = lost.get("lost", "its process ended")
                self._notes.put(f"W&B stopped working near step {self._step} ({reason}). "
                                f"Training goes on; metrics.jsonl has everything.{self._how_to_sync()}")
                self._close()
                return
        answer = answers.get()
        if "done" in answer:
            if mode == "offline":
                self._notes.put(f"W&B: the run was kept offline.{self._how_to_sync()}")
        else:
            reason = answer.get("late") or answer.get("lost") or "its process ended"
            self._notes.put(f"W&B did not finish ({reason}).{self._how_to_sync()}")
        self._close()

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message, default=str) + "\n")
        self._process.stdin.flush()

    def _close(self) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # unsent lines to a process that is gone
            self._process.stdin.close()
        try:
            self._process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _how_to_sync(self) -> str:
        if not self._folder:
            return ""
        # Each start of a run that is offline leaves a folder; W&B joins those of one id, in the order of their start.
        folders = sorted(str(folder) for folder in self._run_dir.glob(f"wandb/offline-run-*-{self._init['id']}"))
        chosen = folders if len(folders) > 1 else [self._folder]
        return f" To upload it: wandb sync {' '.join(shlex.quote(folder) for folder in chosen)}"


def server() -> str:
    """The address of W&B's server."""
    return os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai"


def api_key_at_hand() -> bool:
    """Whether W&B's library would find credentials on this machine, by the environment or netrc. Never asks for any."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(server()).hostname or ""
    files = [os.environ["NETRC"]] if os.environ.get("NETRC") else ["~/.netrc", "~/_netrc"]
    for file in files:
        try:
            if netrc.netrc(os.path.expanduser(file)).authenticators(host):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False


def _listen(process: subprocess.Popen[str], answers: queue.Queue[dict[str, Any]]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        answers.put(json.loads(line))
    answers.put({"gone": True})


def main() -> None:
    # W&B's service inherits 0, 1 and 2. Were it to hold our pipes, their other end would not see us die.
    lines, answers = os.fdopen(os.dup(0), "r", encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
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
    except Exception as error:  # noqa: BLE001
        answer(failed=_reason(error))
        os._exit(1)  # not through wandb's exit hooks, which may wait for a server that never answers
    answer(ready={"dir": run.settings.sync_dir, "url": None if run.offline else run.url})
    _serve(run, lines, answer, start["settings"].get("finish_timeout", 30.0))


def _serve(run: Any, lines: IO[str], answer: Any, limit: float) -> None:
    exit_code = 1
    lost = False
    for line in lines:
        message = json.loads(line)
        if "finish" in message:
            exit_code = message["finish"]
            break
        if lost:
            continue
        try:
            if "log" in message:
                run.log(message["log"])
            else:
                run.summary.update(message["summary"])
        except Exception as error:  # noqa: BLE001
            lost = True
            answer(lost=_reason(error))
    watchdog = threading.Timer(limit + GRACE, os._exit, (1,))
    watchdog.daemon = True
    watchdog.start()
    try:
        run.finish(exit_code=exit_code)
    except Exception as error:  # noqa: BLE001
        answer(late=_reason(error))
        os._exit(1)
    answer(done=True)


def _reason(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300].removesuffix(":")


if __name__ == "__main__":
    main()
