"""Starts, watches and ends the process of a tracker (worker.py).

A tracker's library is a network client with threads, exit hooks and perhaps a service process. In the training
process, a dead network, a killed service or a hanging upload could block a step or the exit. So a tracker has a
separate process, which can be killed. It costs one Python interpreter (about 100 MB of memory) and no time in the
training loop.

metrics.jsonl is the history of a run, and a tracker's history is a copy with one row for each step. Every session
reads the file from its first line and skips the rows that the tracker already has. So the next session completes a
failed session. `fxtune sync` runs a session without training. If W&B is offline, its newest folder has all rows.
`wandb sync` sends all rows of a folder, so it is suggested only if the server has no rows of the run.
"""

from __future__ import annotations

import contextlib
import json
import netrc
import os
import queue
import shlex
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fxtune.system.terminal.redact import redact_arguments, without_user
from fxtune.tracking import worker

END_TIMEOUT = 30.0  # seconds that the end of a run waits for a tracker in total
UPLOAD_TIMEOUT = 15.0  # seconds of END_TIMEOUT for the last upload; then the run is stored offline
START_TIMEOUT = 120.0  # seconds to start Python and import a library on a slow machine; only a thread waits
SERVICE_TIMEOUT = 15.0  # seconds for W&B's service to start, on top of init_timeout, which wandb enforces
PROGRAM = Path(worker.__file__)
ADDRESS = "WANDB_BASE_URL"
Notes = queue.SimpleQueue[str]


class TrackerClient:
    """Runs a session in each of `modes`, such as online and then offline, until one succeeds. A thread runs the
    sessions."""

    def __init__(
        self, name: str, options: dict[str, Any], run_dir: Path, modes: tuple[str, ...], notes: Notes, patience: float
    ) -> None:
        """`name`: a key of worker.TRACKERS. `options`: arguments of the tracker's Client. `notes` gets the messages.
        `patience`: seconds for the upload if no run trains here, otherwise 0."""
        self.title, self.id = worker.TRACKERS[name].title, options["id"]
        self._init_timeout, self._trains = options.get("init_timeout", END_TIMEOUT), not patience
        self._options = {**options, "dir": str(run_dir), "finish_timeout": patience or UPLOAD_TIMEOUT}
        argv, history = [sys.argv[0], *redact_arguments(sys.argv[1:])], run_dir / worker.HISTORY
        self._first = {"tracker": name, "argv": argv, "pid": os.getpid(), "history": str(history.resolve())}
        self._run_dir, self._folder, self._notes, self._modes = run_dir, run_dir / name, notes, modes
        self._finish: dict[str, Any] | None = None
        self._sending = threading.Lock()
        self._ended, self._abandoned = 0.0, False
        self.trouble: str | None = None
        """Why neither the tracker nor an offline folder has all rows."""
        self.process: subprocess.Popen[str] | None = None
        self.ready = False
        """Whether a session is running in which the tracker has accepted the run."""
        if name == "wandb" and (os.environ.get(ADDRESS) or wandb_server()) != wandb_server():
            notes.put(
                f"W&B: the user and password in {ADDRESS} are left out: W&B logs in by its API key, and its logs "
                "would show them. Remove them from the variable."
            )
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def end(self, exit_code: int, summary: dict[str, Any]) -> None:
        """Let the session end. metrics.jsonl must be complete."""
        with self._sending:
            self._finish, self._ended = {"finish": exit_code, "summary": summary}, time.monotonic()
            self._send(self._finish)

    def wait(self, patience: float | None = None) -> bool:
        """Wait for the last upload after end(), and return whether it ended.

        `patience`: seconds to wait; None: END_TIMEOUT after end(), plus the time that the tracker has to start. A run
        that is resumed later need not wait: the next session sends the missing rows.
        """
        rest = self._ended + self._init_timeout + END_TIMEOUT - time.monotonic()
        self._thread.join(max(rest, 0.0) if patience is None else patience)
        if self._thread.is_alive():
            self._abandoned = True
            if patience is None:
                self._notes.put(f"{self.title} did not finish in time and was left behind.{self._how_to_sync()}")
                if self.process:
                    self.process.kill()
        return not self._abandoned

    def _run(self) -> None:
        for number, mode in enumerate(self._modes, 1):
            self.trouble = self._session(mode)
            if self.trouble is None or self._abandoned:
                return
            if number < len(self._modes):
                self._notes.put(f"{self.trouble}. Training goes on, and its history is kept offline, from step 1.")
        if self._trains:
            figures = f"all figures are in {worker.HISTORY}.{self._how_to_sync()}"
            self._notes.put(f"{self.trouble}. Training goes on; {figures}")

    def _session(self, mode: str) -> str | None:
        """Run one process of the tracker until the run ends. Returns None if the tracker has all rows, otherwise the
        reason."""
        try:
            self.process = process = self._start(mode)
        except OSError as error:
            return f"{self.title} did not take the run ({error})"
        assert process.stdout
        limit = self._kill_after(START_TIMEOUT)
        answers: dict[str, Any] = {}
        for line in process.stdout:
            answers |= (answer := json.loads(line))
            limit.cancel()
            if "imported" in answer:
                limit = self._kill_after(START_TIMEOUT if mode == "offline" else self._init_timeout + SERVICE_TIMEOUT)
            elif "ready" in answer:
                self._accepted(**answer["ready"])
            elif "done" in answer:
                self._close_input()
        limit.cancel()
        self.ready = False
        self._close_input()
        process.wait()
        if "ready" not in answers:
            silent = f"its library or its service does not start; see {self._folder / 'process.log'}"
            return f"{self.title} did not take the run ({answers.get('failed', silent)})"
        if "done" not in answers:
            reason = answers.get("late") or answers.get("lost") or "its process ended"
            return f"{self.title} {'did not finish' if self._finish else 'stopped working'} ({reason})"
        if mode == "offline":
            self._notes.put(f"{self.title}: the run was kept offline.{self._how_to_sync()}")
        return None

    def _start(self, mode: str) -> subprocess.Popen[str]:
        """Start the tracker's process in `mode` and send it the run's settings. Raises OSError."""
        unwanted = ("WANDB_SERVICE", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")
        environment = {name: value for name, value in os.environ.items() if name not in unwanted}
        if environment.get(ADDRESS):  # if it is not set, W&B's settings may name a server
            environment[ADDRESS] = wandb_server()
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / "process.log").open("ab") as log, self._sending:
            self.process = process = subprocess.Popen(
                [sys.executable, "-P", str(PROGRAM)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                text=True,
                encoding="utf-8",
                start_new_session=True,  # Ctrl-C in the terminal is for the training process alone
            )
            self._send({**self._first, "options": {**self._options, "mode": mode}})
            if self._finish:
                self._send(self._finish)
        return process

    def _send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError, ValueError):  # the process is gone: its output ends, and _session() returns
            if self.process and self.process.stdin:
                self.process.stdin.write(json.dumps(message, default=str) + "\n")
                self.process.stdin.flush()

    def _close_input(self) -> None:
        with contextlib.suppress(OSError), self._sending:
            assert self.process
            assert self.process.stdin
            self.process.stdin.close()

    def _kill_after(self, seconds: float) -> threading.Timer:
        assert self.process
        timer = threading.Timer(seconds, self.process.kill)
        timer.daemon = True
        timer.start()
        return timer

    def _accepted(self, url: str, last: int) -> None:
        self.ready = True
        if url:
            with contextlib.suppress(OSError):
                (self._folder / "online").touch()
            known = f" It has the steps up to {last}, which are not sent again." if last >= 0 else ""
            self._notes.put(f"{self.title}: {url}{known}")

    def _how_to_sync(self) -> str:
        """A sentence with the command that completes the tracker's history."""
        # W&B appends -1 to the name of a second folder within one second. The newest folder has the whole history.
        folders = sorted(self._folder.glob(f"offline-run-*-{self.id}*"))
        if folders and not (self._folder / "online").exists():
            return f" To upload it: wandb sync {shlex.quote(str(folders[-1]))}"
        return f" To upload it: fxtune sync {shlex.quote(str(self._run_dir))}"


def wandb_server() -> str:
    """The address of W&B's server without user and password. W&B does not send them, and its logs would show them."""
    return without_user(os.environ.get(ADDRESS) or "https://api.wandb.ai")


def api_key_at_hand() -> bool:
    """Whether W&B's library would find credentials on this machine, in the environment or netrc. Never prompts."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(wandb_server()).hostname or ""
    for file in [os.environ["NETRC"]] if os.environ.get("NETRC") else ["~/.netrc", "~/_netrc"]:
        with contextlib.suppress(OSError, netrc.NetrcParseError):
            if netrc.netrc(os.path.expanduser(file)).authenticators(host):
                return True
    return False
