"""Starts, watches and ends the process that runs W&B (wandb_worker.py).

W&B is a network client with threads, exit hooks and a service process. In the training process a dead network, a
killed service or a hanging upload would block a step or the exit. In a separate process the worst case is that the
separate process is killed. It costs one Python interpreter (about 100 MB of memory) and no time in the training loop.

metrics.jsonl is the history of a run, and W&B's history is a copy of it with one row for each step. Every session
starts from the file's first line. Online, rows that the server has are skipped; offline, the newest folder holds all
rows. So the next session completes a failed session. `fxtune sync` runs a session without training. `wandb sync` sends
all rows of a folder, also rows that the server has, so it is suggested only if the server has no rows.
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
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fxtune.system.redact import without_user
from fxtune.tracking import wandb_worker

END_TIMEOUT = 30.0  # seconds that the end of a run waits for W&B in total
UPLOAD_TIMEOUT = 15.0  # of these, seconds for the last upload; the rest is for storing the run offline instead
START_TIMEOUT = 120.0  # seconds for a Python to import wandb on a slow or busy machine; only a thread waits for it
SERVICE_TIMEOUT = 15.0  # seconds on top of init_timeout (which wandb itself enforces online) for starting its service
PROGRAM = Path(wandb_worker.__file__)
ADDRESS = "WANDB_BASE_URL"


class WandbClient:
    """Runs a session in each of `modes` until one succeeds, such as online, then offline. A thread watches it."""

    def __init__(
        self,
        init: dict[str, Any],
        run_dir: Path,
        argv: list[str],
        modes: tuple[str, ...],
        init_timeout: float,
        notes: queue.SimpleQueue[str],
        upload_timeout: float | None = None,
    ) -> None:
        """`init`: arguments of wandb.init. `argv`: the command to show, free of secrets. `notes` gets the messages."""
        self._init = {**init, "dir": str(run_dir)}
        self._run_dir, self._argv, self._notes, self._modes = run_dir, argv, notes, modes
        self._settings: dict[str, Any] = {
            "init_timeout": init_timeout,
            "finish_timeout": upload_timeout or UPLOAD_TIMEOUT,
            "finish_timeout_raises": True,
            "silent": True,
            "console": "off",
            "x_stats_pid": os.getpid(),
            "disable_job_creation": True,
        }
        self._finish: dict[str, Any] | None = None
        self._sending = threading.Lock()
        self._abandoned = False
        self.trouble: str | None = None
        """Why neither W&B nor an offline folder has all rows."""
        self.process: subprocess.Popen[str] | None = None
        self.folder: str | None = None
        """The folder of the session, once the session is ready."""
        if (os.environ.get(ADDRESS) or server()) != server():
            notes.put(
                f"W&B: the user and password in {ADDRESS} are left out: W&B logs in by its API key, and its logs "
                "would show them. Remove them from the variable."
            )
        self._thread = threading.Thread(target=self._run, name="wandb", daemon=True)
        self._thread.start()

    def finish(self, exit_code: int, summary: dict[str, Any], patience: float | None = None) -> bool:
        """Wait for the last upload, and return whether it ended. metrics.jsonl must be complete.

        `patience`: seconds to wait; None: END_TIMEOUT and the time that W&B has to start. A run that is resumed later
        need not wait: the next session sends the missing rows.
        """
        with self._sending:
            if self._finish is None:
                self._finish = {"finish": exit_code, "summary": summary}
                self._send(self._finish)
        self._thread.join(self._settings["init_timeout"] + END_TIMEOUT if patience is None else patience)
        if self._thread.is_alive():
            self._abandoned = True
            if patience is None:
                self._notes.put(f"W&B did not finish in time and was left behind.{self._how_to_sync()}")
                if self.process:
                    self.process.kill()
        return not self._abandoned

    def _run(self) -> None:
        for number, mode in enumerate(self._modes, 1):
            self.trouble = self._session(mode)
            if self.trouble is None or self._abandoned:
                return
            if number < len(self._modes):
                self._notes.put(
                    f"{self.trouble}. Training goes on, and W&B's history is kept offline, from the first step on."
                )
        if "offline" in self._modes:
            self._notes.put(
                f"{self.trouble}. Training goes on; all figures are in {wandb_worker.HISTORY}.{self._how_to_sync()}"
            )

    def _session(self, mode: str) -> str | None:
        """Run one W&B process until the run ends. Returns None if it has all rows, else the reason."""
        try:
            self.process = process = self._start(mode)
        except OSError as error:
            return f"W&B did not take the run ({error})"
        assert process.stdout
        limit = self._kill_after(START_TIMEOUT)
        answers: dict[str, Any] = {}
        for line in process.stdout:
            answers |= (answer := json.loads(line))
            limit.cancel()
            if "imported" in answer:
                timeout = self._settings["init_timeout"] + SERVICE_TIMEOUT if mode == "online" else START_TIMEOUT
                limit = self._kill_after(timeout)
            elif "ready" in answer:
                self._ready(mode, **answer["ready"])
            elif "done" in answer:
                self._close_input()
        limit.cancel()
        self.folder = None
        self._close_input()
        process.wait()
        if "ready" not in answers:
            silent = f"its library or its service does not start; see {self._run_dir / 'wandb' / 'process.log'}"
            return f"W&B did not take the run ({answers.get('failed', silent)})"
        if "done" not in answers:
            reason = answers.get("late") or answers.get("lost") or "its process ended"
            return f"W&B {'did not finish' if self._finish else 'stopped working'} ({reason})"
        if mode == "offline":
            self._notes.put(f"W&B: the run was kept offline.{self._how_to_sync()}")
        return None

    def _start(self, mode: str) -> subprocess.Popen[str]:
        """Start the W&B process in `mode` and send it the run's settings. Raises OSError."""
        folder = self._run_dir / "wandb"
        # W&B's error reports to its makers would contain more than a run's metrics, and there may be no network for
        # them.
        environment = {**os.environ, "WANDB_ERROR_REPORTING": "false"}
        environment.pop("WANDB_SERVICE", None)
        if environment.get(ADDRESS):  # else W&B's own settings may name one
            environment[ADDRESS] = server()
        # An offline run has all rows, so its upload must start at row 0 of the server's history; `resume` would append
        # them.
        init = {**self._init, "mode": mode, "resume": "allow" if mode == "online" else None}
        history = str((self._run_dir / wandb_worker.HISTORY).resolve())
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "process.log").open("ab") as log, self._sending:
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
            self._send({"argv": self._argv, "settings": self._settings, "init": init, "history": history})
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

    def _ready(self, mode: str, dir: str, url: str | None, last: int) -> None:
        self.folder = dir
        if mode == "online":
            with contextlib.suppress(OSError):
                (self._run_dir / "wandb" / "online").touch()
            known = f" It has the steps up to {last}, which are not sent again." if last >= 0 else ""
            self._notes.put(f"W&B: {url}{known}")

    def _how_to_sync(self) -> str:
        """A sentence with the command that completes W&B's history."""
        # W&B appends -1 to the name of a second folder within one second. The newest folder has the whole history.
        folders = sorted(self._run_dir.glob(f"wandb/offline-run-*-{self._init['id']}*"))
        if folders and not (self._run_dir / "wandb" / "online").exists():
            return f" To upload it: wandb sync {shlex.quote(str(folders[-1]))}"
        return f" To upload it: fxtune sync {shlex.quote(str(self._run_dir))}"


def server() -> str:
    """The address of W&B's server, without a user and password: W&B sends neither, and its logs show both."""
    return without_user(os.environ.get(ADDRESS) or "https://api.wandb.ai")


def api_key_at_hand() -> bool:
    """Whether W&B's library would find credentials on this machine, in the environment or netrc. Never prompts."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(server()).hostname or ""
    for file in [os.environ["NETRC"]] if os.environ.get("NETRC") else ["~/.netrc", "~/_netrc"]:
        with contextlib.suppress(OSError, netrc.NetrcParseError):
            if netrc.netrc(os.path.expanduser(file)).authenticators(host):
                return True
    return False
