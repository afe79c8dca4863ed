"""Runs that are killed with SIGKILL at chosen moments, started again, and compared with one that nobody disturbed.

    with ForkServer() as server:
        reference = Reference.of(server, command(folder), folder)
        fate = disturb(server, reference, other, [Aim("saving"), Aim(share=0.7)])

`ForkServer` forks runs from a parent that has imported everything (traced.py says what that skips), and each run writes down
what it does. A SIGKILL takes a process, not the machine: what was written is in the page cache, so that nothing here shows
that the fsyncs are at the right places. tests/faults/test_storage.py is about the disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from support.endings import Ending, Traced, lineage
from support.harness import ENVIRON, HERE, command, write_chats

START = 120
"""Seconds in which a server must have imported everything."""
BACKGROUND = ("saving", "pruning")
"""Phases of a thread."""


@dataclass
class ForkServer:
    """A parent that forks runs; one at a time. Use as a context manager."""

    process: subprocess.Popen[str] = field(init=False)
    noise: IO[str] = field(init=False)
    """What importing and ending print; each run has a log of its own."""

    def __enter__(self) -> ForkServer:
        code = f"import sys; sys.path.insert(0, {str(HERE)!r}); from support import traced; traced.serve()"
        self.noise = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            stderr=self.noise,
            env={**os.environ, **ENVIRON},
            start_new_session=True,
        )
        assert self.answer(START)["ready"]
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:  # a test failed while a run was under way
            self.process.kill()
        self.noise.close()

    def start(
        self, words: list[str], folder: Path, trace: str = "trace.jsonl", last_operation: int = 0, **environ: str
    ) -> Forked:
        """Begin a run in `folder`; its output is added to `folder`/log.txt, its trace begins anew. See traced.watch()."""
        assert self.process.stdin
        (folder / trace).unlink(missing_ok=True)
        print(
            json.dumps(
                {
                    "argv": words,
                    "cwd": str(folder),
                    "log": str(folder / "log.txt"),
                    "trace": str(folder / trace),
                    "last_operation": last_operation,
                    "environ": environ,
                }
            ),
            file=self.process.stdin,
            flush=True,
        )
        return Forked(self, self.answer(START)["pid"], folder / trace)

    def answer(self, timeout: float) -> dict[str, Any]:
        assert self.process.stdout
        if not select.select([self.process.stdout], [], [], timeout)[0]:
            raise TimeoutError
        line = self.process.stdout.readline()
        if not line:
            self.noise.seek(0)
            raise AssertionError(f"the parent of the runs died: {self.noise.read()[-3000:]}")
        return dict(json.loads(line))


@dataclass
class Processes:
    """Begins runs as ForkServer does, each as a process from Python's start on: CUDA does not survive a fork. One at a time."""

    process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process and self.process.poll() is None:  # a test failed while a run was under way
            self.process.kill()
            self.process.wait()

    def start(self, words: list[str], folder: Path, trace: str = "trace.jsonl") -> Forked:
        """Begin a run in `folder`; its output is added to `folder`/log.txt, its trace begins anew."""
        (folder / trace).unlink(missing_ok=True)
        with (folder / "log.txt").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "traced.py"), str(folder / trace), *words],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, **ENVIRON},
            )
        return Forked(self, self.process.pid, folder / trace)

    def answer(self, timeout: float) -> dict[str, Any]:
        assert self.process
        try:
            return {"status": self.process.wait(timeout)}
        except subprocess.TimeoutExpired:
            raise TimeoutError from None


@dataclass
class Forked:
    """A run that a ForkServer began, or Processes."""

    server: ForkServer | Processes
    pid: int
    file: Path
    began: float = field(default_factory=time.monotonic)

    def wait(self, timeout: float = 600) -> int:
        """Its exit code, when it ended; -9 of one that was killed. AssertionError of one that is still there after `timeout`."""
        try:
            return int(self.server.answer(timeout)["status"])
        except TimeoutError:
            inside = Traced.read(self.file).lines[-3:]
            self.kill()
            self.server.answer(START)
            raise AssertionError(f"it hangs, after {timeout} s, its last lines being {inside}") from None

    def kill(self, alone: bool = False) -> float:
        """SIGKILL to it and all its children, or to it `alone`, as the kernel does for want of memory. Returns when."""
        with contextlib.suppress(ProcessLookupError):
            (os.kill if alone else os.killpg)(self.pid, signal.SIGKILL)
        return time.monotonic()

    def ended(self) -> bool:
        with contextlib.suppress(OSError):
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        return True

    def until(self, phase: str, occurrence: int = 1) -> bool:
        """Wait until it enters `phase` for the n-th time. Whether it did; False: it ended before."""
        wanted = f'"enter": "{phase}"'.encode()
        while True:
            over = self.ended()
            with contextlib.suppress(FileNotFoundError):
                if self.file.read_bytes().count(wanted) >= occurrence:
                    return True
            if over:
                return False
            time.sleep(0.001)

    def children_left(self, within: float = 10) -> bool:
        """Whether a process of its group is still there `within` seconds after it ended."""
        until = time.monotonic() + within
        while time.monotonic() < until:
            try:
                os.killpg(self.pid, 0)
            except ProcessLookupError:
                return False
            time.sleep(0.05)
        return True


@dataclass(frozen=True)
class Aim:
    """When to kill a run: after `share` of the time that the undisturbed one took for `phase`, the n-th of them; or of all."""

    phase: str = ""
    occurrence: int = 1
    share: float = 0.5
    alone: bool = False
    """Only the process itself; its workers are left to notice."""
    operation: int = 0
    """In place of all of this: it dies before it does its n-th thing to a file of its folder."""


@dataclass
class Reference:
    """A run that nobody disturbed, and how long it took."""

    words: list[str]
    ending: Ending
    trace: Traced
    seconds: float

    @staticmethod
    def of(server: ForkServer, words: list[str], folder: Path, **environ: str) -> Reference:
        forked = server.start(words, folder, **environ)
        code = forked.wait()
        seconds = time.monotonic() - forked.began
        assert code == 0, (folder / "log.txt").read_text()[-3000:]
        trace = Traced.read(forked.file)
        return Reference(words, Ending.of(folder / "run", [trace]), trace, seconds)


@dataclass
class Kill:
    aim: Aim
    phases: list[str]
    """What the run was in when it died, outermost first; empty: between two of them."""
    after: float
    """Seconds since it was started."""
    steps: int
    """Steps that were done by then."""
    resumed: int = 0
    """Steps that the next attempt did not do again."""
    lost: float = 0.0
    """Seconds of work that were done again."""

    @property
    def phase(self) -> str:
        """The innermost; writing a checkpoint in the background comes before whatever the loop did meanwhile."""
        background = [name for name in BACKGROUND if name in self.phases]
        return [*background, *self.phases[::-1], "between"][0]


@dataclass
class Fate:
    """What became of a run that was killed again and again."""

    kills: list[Kill]
    code: int
    """Of the last attempt, which nobody killed."""
    differences: list[str]
    """From the undisturbed run."""
    left: bool
    """A process of it is still there."""
    attempts: list[Traced] = field(default_factory=list)
    twice: bool = False
    """Killed twice in one epoch."""

    @property
    def identical(self) -> bool:
        return self.code == 0 and not self.differences and not self.left


def disturb(server: ForkServer, reference: Reference, folder: Path, aims: list[Aim], **environ: str) -> Fate:
    """Run the words of `reference` in `folder`, kill the first attempts by `aims`, and let the last one end."""
    kills: list[Kill] = []
    attempts: list[Traced] = []
    begun: list[Forked] = []
    died: list[float] = []
    for aim in aims:
        forked = server.start(reference.words, folder, f"trace-{len(begun)}.jsonl", aim.operation, **environ)
        begun.append(forked)
        if aim.operation:
            code, at = forked.wait(), time.monotonic()
        else:
            at = _kill(forked, aim, reference)
            code = forked.wait()
        attempts.append(Traced.read(forked.file))
        if code == -signal.SIGKILL:
            died.append(at)
            done = lineage(attempts)
            kills.append(Kill(aim, attempts[-1].inside(), at - forked.began, done[-1]["step"] + 1 if done else 0))
        else:  # it was faster than the kill
            died.append(0.0)
            if code:
                return Fate(kills, code, ["an attempt failed: " + tail(folder)], False, attempts)
    last = server.start(reference.words, folder, f"trace-{len(begun)}.jsonl", **environ)
    begun.append(last)
    code = last.wait()
    attempts.append(Traced.read(last.file))
    _account(kills, attempts, begun, died)
    left = any(forked.children_left() for forked in begun)
    if code:
        return Fate(kills, code, [tail(folder)], left, attempts)
    return Fate(kills, code, reference.ending.differences(Ending.of(folder / "run", attempts)), left, attempts)


def _kill(forked: Forked, aim: Aim, reference: Reference) -> float:
    """Wait for the instant, and kill. Returns when that was."""
    pause = aim.share * reference.seconds
    if aim.phase:
        spans = reference.trace.spans(aim.phase) or [(0.0, 0.0)]
        arrived = forked.until(aim.phase, aim.occurrence)
        begin, end = spans[min(aim.occurrence, len(spans)) - 1]
        pause = aim.share * (end - begin) * arrived
    time.sleep(pause)
    return forked.kill(aim.alone)


def _account(kills: list[Kill], attempts: list[Traced], begun: list[Forked], died: list[float]) -> None:
    """Fill in what each kill cost: the time since the step that the next attempt went on from, or since the start."""
    pending = iter(kills)
    for at, when in enumerate(died):
        if not when:
            continue
        kill = next(pending)
        later = [line["step"] for attempt in attempts[at + 1 :] for line in attempt.steps()]
        kill.resumed = later[0] if later else kill.steps
        reached = [line["at"] for line in attempts[at].steps() if line["step"] < kill.resumed]
        kill.lost = when - max([begun[at].began, *reached[-1:]])


def tail(folder: Path, characters: int = 1500) -> str:
    """The end of what the runs in `folder` printed."""
    return (folder / "log.txt").read_text(errors="replace")[-characters:]


LEARNS = ("data.eval_fraction=0.1", "train.eval_every=6")
MODES: dict[str, tuple[str, ...]] = {
    "lora": (
        *LEARNS,
        "techniques.lora.dropout=0.1",
        "data.questions={path: questions.jsonl, limit: 4, max_new_tokens: 4}",
    ),
    "full": (*LEARNS, "techniques.lora.enabled=false", "optimizer.name=muon"),
    "packed": (
        *LEARNS,
        "data.packing=true",
        "techniques.attention.enabled=true",
        "checkpoint.every=2",
        "train.micro_batch_size=1",
        "train.global_batch_size=2",
    ),
    "bucketed": ("data.buckets=[32,64,128]", "optimizer.name=adafactor", "techniques.checkpointing.enabled=true"),
    "float16": ("model.dtype=float16", "data.buckets=[128]"),
    "workers": (*LEARNS, "loader.num_workers=4"),
    "tokenisers": ("data.workers=2", "data.sources=[{path: many.jsonl}]", "train.max_steps=6", "checkpoint.every=2"),
    "compiled": ("techniques.compile.enabled=true", "data.buckets=[128]", "train.max_steps=12"),
}
"""What is added to command(). The first three evaluate, so they save at other steps, too."""


def prepare(folder: Path, mode: str) -> list[str]:
    """The words of a run of `mode` in `folder`, which gets what they name."""
    folder.mkdir(parents=True)
    write_chats(folder / "questions.jsonl", 4, seed=1)
    if mode == "tokenisers":
        write_chats(folder / "many.jsonl", 20_000)  # a few shards: more than what this process would do by itself
    return command(folder, *MODES[mode])
