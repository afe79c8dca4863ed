"""The feed of W&B, which runs in a process of its own (wandb_process.py).

W&B is a network client with threads, exit hooks and a service process. In the training process a dead network, a killed
service or an upload that hangs would block a step or the exit, or raise from a hook. So it owns a process, which is fed from
a thread here: the worst that can happen is that this process is killed. It costs one Python interpreter (about 100 MB of
memory) and no time in the loop.

metrics.jsonl is what happened; W&B's history is a copy of it, one row for each step. Every session starts from the file's
first line: online, rows that the server has are left out, so a run that goes on sends what an earlier stretch could not, and
no step twice; offline, all of it is in the newest folder. So whatever becomes of a session (a server that refuses, a service
that is killed, an upload that never ends), the next one makes it whole, and `fxtune sync` is a session that does nothing else.
`wandb sync` would send all rows of a folder, also those that the server has: it is named where the server has none.
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fxtune.system.redact import without_user
from fxtune.tracking import wandb_worker
from fxtune.tracking.wandb_worker import STEP

END_TIMEOUT = 30.0  # seconds that the end of a run waits for W&B, all together
UPLOAD_TIMEOUT = 15.0  # of those, for the last upload; the rest is for keeping the run offline instead
START_TIMEOUT = (
    30.0  # seconds for a Python that imports wandb, on a slow disk; nobody waits for it but the feeding thread
)
QUEUED = 20_000  # messages kept while W&B starts or stalls
PROGRAM = Path(wandb_worker.__file__)
ADDRESS = "WANDB_BASE_URL"


class WandbClient:
    """Feeds the W&B process from a thread, starts another one offline when that cannot be, and ends it in time."""

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
        """`init`: arguments of wandb.init. `argv`: the command to show, free of secrets. `notes` gets the messages. `modes`:
        online or offline, of one session after another: the next is for when the one before it failed.
        """
        self._init = {**init, "dir": str(run_dir)}
        self._run_dir = run_dir
        self._argv = argv
        self._notes = notes
        self._modes = modes
        self._init_timeout = init_timeout
        self._settings = {
            "init_timeout": init_timeout,
            "finish_timeout": upload_timeout or UPLOAD_TIMEOUT,
            "finish_timeout_raises": True,
            "silent": True,
            "console": "off",
            "x_stats_pid": os.getpid(),
            "disable_job_creation": True,
        }
        self._queue: queue.Queue[dict[str, Any]] = queue.Queue(QUEUED)
        self._full = False
        self._over = False
        self._step = 0
        self._summary: dict[str, Any] = {}
        self._exit_code: int | None = None
        self.trouble: str | None = None
        """Why W&B does not have everything, nor an offline folder."""
        self._process: subprocess.Popen[str] | None = None
        self._folder: str | None = None
        if (os.environ.get(ADDRESS) or server()) != server():
            notes.put(
                f"W&B: the user and password in {ADDRESS} are left out: W&B logs in by its API key, and its logs would "
                "show them. Take them out of there."
            )
        self._thread = threading.Thread(target=self._run, name="wandb-feed", daemon=True)
        self._thread.start()

    def put(self, message: dict[str, Any], step: int) -> None:
        """`{"log": row, "end": where its line of metrics.jsonl ends, or None}` or `{"summary": figures}`."""
        self._step = step
        if self._over:
            return
        try:
            self._queue.put_nowait(message)
        except queue.Full:
            if not self._full:
                self._notes.put(f"W&B does not keep up: what it misses from step {step} on is in metrics.jsonl")
            self._full = True

    def finish(self, exit_code: int, patience: float | None = None) -> bool:
        """Wait for the last upload: `patience` seconds (None: END_TIMEOUT), and for W&B's start if that is still under way.
        Returns whether it ended.

        A run that goes on later need not wait: the next session sends what this one did not.
        """
        deadline = time.monotonic() + (self._init_timeout + END_TIMEOUT if patience is None else patience)
        try:
            self._queue.put({"finish": exit_code}, timeout=1)
        except queue.Full:
            deadline = 0.0  # it has not read for 20,000 messages and will not read this one
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._over = True
            if patience is None:
                self._notes.put(f"W&B did not finish in time and was left behind.{self._how_to_sync()}")
                if self._process:
                    self._process.kill()
        return not self._over

    def _run(self) -> None:
        """One session, and where it fails an offline one. Each is given all figures of the run."""
        for left, mode in enumerate(self._modes, 1 - len(self._modes)):
            trouble = self._session(mode)
            if trouble is None or self._over:
                return
            if left:
                self._notes.put(
                    f"{trouble}. Training goes on, and W&B's history is kept offline, from the first step on."
                )
        self.trouble, self._over = trouble, True
        if "offline" in self._modes:
            self._notes.put(f"{trouble}. Training goes on; all figures are in metrics.jsonl.{self._how_to_sync()}")

    def _session(self, mode: str) -> str | None:
        """Feed one W&B process until the run ends. Returns why it does not have everything, or None."""
        answers: queue.Queue[dict[str, Any]] = queue.Queue()
        if (reason := self._start(mode, answers)) is not None:
            return f"W&B did not take the run ({reason})"
        try:
            replayed = self._replay()
            if self._summary:
                self._send({"summary": self._summary})
            while self._exit_code is None:
                message = self._queue.get()
                if "finish" in message:
                    self._exit_code = message["finish"]
                    break
                if "summary" in message:
                    self._summary |= message["summary"]
                    self._send(message)
                elif message["end"] is None or message["end"] > replayed:  # else it came with the replay
                    self._send({"log": message["log"]})
                if not answers.empty():
                    break
            if self._exit_code is not None:
                self._send({"finish": self._exit_code})
        except OSError:
            pass  # the process is gone; the answers say so
        answer = answers.get()
        self._close()
        if "done" not in answer:
            reason = answer.get("late") or answer.get("lost") or "its process ended"
            what = "did not finish" if self._exit_code is not None else f"stopped working near step {self._step}"
            return f"W&B {what} ({reason})"
        if mode == "offline":
            self._notes.put(f"W&B: the run was kept offline.{self._how_to_sync()}")
        return None

    def _replay(self) -> int:
        """Send the lines of metrics.jsonl. Returns where the last one ends, in bytes from its beginning."""
        end = 0
        for line in _lines(self._run_dir / "metrics.jsonl"):
            end += len(line)
            with contextlib.suppress(ValueError, AttributeError, RecursionError):  # what a full disk left
                row = {name: value for name, value in json.loads(line).items() if value is not None}
                if STEP in row:
                    row["_timestamp"] = row.pop("time", None) or time.time()
                    self._send({"log": row})
        return end

    def _start(self, mode: str, answers: queue.Queue[dict[str, Any]]) -> str | None:
        """Start the W&B process in `mode`; None once it is ready, else the reason."""
        folder = self._run_dir / "wandb"
        # Its reports of errors to its makers would carry more than a run's figures, and there may be no network for them.
        environment = {
            "WANDB_ERROR_REPORTING": "false",
            **{name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"},
        }
        if environment.get(ADDRESS):  # else W&B's own settings may name one
            environment[ADDRESS] = server()
        # Synced later, an offline run begins at row 0 of the server's history: it has all rows. With `resume` it would be added.
        init = {**self._init, "mode": mode, "resume": "allow" if mode == "online" else None}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / "process.log").open("ab") as log:
                self._process = process = subprocess.Popen(
                    [sys.executable, "-P", str(PROGRAM)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=environment,
                    text=True,
                    encoding="utf-8",
                    start_new_session=True,
                )  # Ctrl-C in the terminal is for the training process alone
            threading.Thread(target=_listen, args=(process, answers), daemon=True).start()
            self._send({"argv": self._argv, "settings": self._settings, "init": init})
            answer = answers.get(timeout=START_TIMEOUT)
            if "imported" in answer:
                answer = answers.get(timeout=self._init_timeout + 1)
        except OSError as error:
            return str(error)
        except queue.Empty:
            process.kill()
            return f"no answer in {self._init_timeout:g} s"
        if "ready" not in answer:
            process.kill()
            return str(answer.get("failed", f"its process ended; see {folder / 'process.log'}"))
        self._folder = answer["ready"]["dir"]
        if mode == "online":
            with contextlib.suppress(OSError):
                (folder / "online").touch()
            last = answer["ready"]["last"]
            known = f" It has the steps up to {last}, which are not sent again." if last >= 0 else ""
            self._notes.put(f"W&B: {answer['ready']['url']}{known}")
        return None

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
        """The command that completes W&B's history."""
        # A second one within a second ends with -1.
        folders = sorted(self._run_dir.glob(f"wandb/offline-run-*-{self._init['id']}*"))
        if folders and not (self._run_dir / "wandb" / "online").exists():
            return f" To upload it: wandb sync {shlex.quote(str(folders[-1]))}"  # this one folder: it has the whole history
        return f" To upload it: fxtune sync {shlex.quote(str(self._run_dir))}"


def _lines(file: Path) -> Iterator[bytes]:
    """The whole lines of a file; none where it cannot be read."""
    with contextlib.suppress(OSError), file.open("rb") as stream:
        yield from (line for line in stream if line.endswith(b"\n"))


def server() -> str:
    """The address of W&B's server, without a user and password: W&B sends neither, and its logs show both."""
    return without_user(os.environ.get(ADDRESS) or "https://api.wandb.ai")


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
