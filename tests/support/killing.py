"""Kills runs with SIGKILL at chosen moments, starts them again, and compares them with an undisturbed run.

    with ForkServer() as server:
        reference = Reference.of(server, command(folder), folder)
        outcome = disturb(server, reference, other, [Aim("saving"), Aim(share=0.7)])

`ForkServer` forks runs from a parent that has imported all packages (see traced.py), and each run writes a trace.
SIGKILL ends a process, not the machine: written data stays in the page cache. So these tests do not show that fsync
calls are in the right places; tests/faults/test_storage.py tests the disk.
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

from support.endings import Ending, Traced, effective_steps
from support.harness import (
    HERE,
    command,
    user_environment,
    wait_for,
    write_chats,
    write_companions,
    write_preferences,
    write_texts,
)
from support.mixtures import ON_EXPERTS, QWEN3_MOE
from support.processes import alive, group, stopped
from support.processors import write_model, write_picture_rows
from support.traced import STOP

START = 600
"""Seconds that a server may take to import all packages, on a machine with other work on it."""
BACKGROUND = ("saving", "pruning")
"""Phases of the background thread."""


@dataclass
class ForkServer:
    """A parent process that forks runs, also several at a time. Use it as a context manager."""

    environ: dict[str, str] = field(default_factory=dict)
    """Further variables of the parent process, and so of each run."""
    process: subprocess.Popen[bytes] = field(init=False)
    ended: dict[int, int] = field(default_factory=dict)
    """The exit codes of runs that ended, until somebody asks."""
    noise: IO[str] = field(init=False)
    """Output of the parent process. Each run has its own log."""

    def __enter__(self) -> ForkServer:
        code = f"import sys; sys.path.insert(0, {str(HERE)!r}); from support import traced; traced.serve()"
        self.noise = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # so that select() sees a second line that has arrived with the first
            stderr=self.noise,
            env=user_environment(**self.environ),
            start_new_session=True,
        )
        assert self._heard(START)["ready"]
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:  # a test failed during a run
            self.process.kill()
        self.noise.close()

    def start(
        self,
        words: list[str],
        folder: Path,
        trace: str = "trace.jsonl",
        last_operation: int = 0,
        function: str = "fxtune.cli.main:main",
        stops: tuple[str, int] | None = None,
        **environ: str,
    ) -> Forked:
        """Start a run in `folder`, or another `function` ("module:name") of a list of words, which returns an exit code.

        Its output is appended to `folder`/log.txt, and its trace file is replaced. See traced.watch(). `stops`: see
        Forked.
        """
        assert self.process.stdin
        (folder / trace).unlink(missing_ok=True)
        request = {
            "argv": words,
            "cwd": str(folder),
            "log": str(folder / "log.txt"),
            "trace": str(folder / trace),
            "last_operation": last_operation,
            "environ": {**environ, **({STOP: f"{stops[0]}@{stops[1]}"} if stops else {})},
            "function": function,
        }
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        while "started" not in (answer := self._heard(START)):
            self.ended[answer["ended"]] = answer["status"]
        self.ended.pop(answer["started"], None)  # an earlier run had the same process id
        return Forked(self, answer["started"], folder / trace, stops=stops)

    def status(self, pid: int, timeout: float) -> int:
        """The exit code of a run, after its end. Raises TimeoutError."""
        until = time.monotonic() + timeout
        while pid not in self.ended:
            answer = self._heard(max(until - time.monotonic(), 0))
            self.ended[answer["ended"]] = answer["status"]
        return self.ended.pop(pid)

    def _heard(self, timeout: float) -> dict[str, Any]:
        """The next line of the parent process. Raises TimeoutError."""
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
    """Starts runs like ForkServer, but each as a new Python process, because CUDA cannot be used after a fork.

    One at a time.
    """

    process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process and self.process.poll() is None:  # a test failed during a run
            self.process.kill()
            self.process.wait()

    def start(self, words: list[str], folder: Path, trace: str = "trace.jsonl") -> Forked:
        """Start a run in `folder`. Its output is appended to `folder`/log.txt, and its trace file is replaced."""
        (folder / trace).unlink(missing_ok=True)
        with (folder / "log.txt").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "traced.py"), str(folder / trace), *words],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=user_environment(),
            )
        return Forked(self, self.process.pid, folder / trace)

    def status(self, pid: int, timeout: float) -> int:
        assert self.process
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise TimeoutError from None


@dataclass
class Forked:
    """A run that ForkServer or Processes started."""

    server: ForkServer | Processes
    pid: int
    file: Path
    began: float = field(default_factory=time.monotonic)
    stops: tuple[str, int] | None = None
    """The phase at which the run stops itself, and which of its occurrences (traced.STOP)."""

    def stopped(self) -> bool:
        """Wait until the run has stopped itself; False if it ends before. A kill ends it there, and so does send()."""
        assert self.stops
        wait_for(lambda: stopped(self.pid) or self.ended())
        return not self.ended()

    def send(self, how: signal.Signals, group: bool = False) -> None:
        """Send a signal to the run, or to its process group, and let a run that has stopped itself go on with it."""
        (os.killpg if group else os.kill)(self.pid, how)
        with contextlib.suppress(ProcessLookupError):  # the signal has ended it
            os.kill(self.pid, signal.SIGCONT)

    def wait(self, timeout: float = 600) -> int:
        """Wait for the end of the run.

        Returns its exit code (-9 if killed). AssertionError if it still runs after `timeout`.
        """
        try:
            return self.server.status(self.pid, timeout)
        except TimeoutError:
            inside = Traced.read(self.file).lines[-3:]
            self.kill()
            self.server.status(self.pid, START)
            raise AssertionError(f"the run still hangs after {timeout} s; its last trace lines: {inside}") from None

    def kill(self, alone: bool = False) -> float:
        """Send SIGKILL to the run and its children, or to the main process `alone`. Returns the time of the kill."""
        with contextlib.suppress(ProcessLookupError):
            (os.kill if alone else os.killpg)(self.pid, signal.SIGKILL)
        return time.monotonic()

    def ended(self) -> bool:
        return not alive(self.pid)

    def until(self, phase: str, occurrence: int = 1, timeout: float = 600) -> bool:
        """Wait until the run enters `phase` for the n-th time.

        Returns False if it ends before. Kills it and raises AssertionError if it does neither within `timeout`.
        """
        wanted = f'"enter": "{phase}"'.encode()
        limit = time.monotonic() + timeout
        while time.monotonic() < limit:
            over = self.ended()
            with contextlib.suppress(FileNotFoundError):
                if self.file.read_bytes().count(wanted) >= occurrence:
                    return True
            if over:
                return False
            time.sleep(0.001)
        self.kill()
        self.server.status(self.pid, START)
        raise AssertionError(f"the run has not entered {phase!r} {occurrence} times within {timeout} s")

    def children_left(self, within: float = 120) -> bool:
        """Whether a process of the run's group still runs `within` seconds after its end."""
        until = time.monotonic() + within
        while (left := bool(group(self.pid))) and time.monotonic() < until:
            time.sleep(0.05)
        return left


@dataclass(frozen=True)
class Aim:
    """When to kill a run: as it enters the n-th `phase`. The run stops itself there (traced.STOP), so the moment is
    the same on each machine.
    """

    phase: str = ""
    occurrence: int = 1
    share: float | None = None
    """If set, kill the run after this share of the time that the undisturbed run took for the n-th `phase`, or for
    everything without a phase. How far the run has come by then depends on the machine."""
    alone: bool = False
    """Kill only the main process. Its workers must notice."""
    operation: int = 0
    """If set, kill the run before its n-th file operation instead."""


@dataclass
class Reference:
    """An undisturbed run and its duration."""

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
    """The phases of the run when it died, outermost first. Empty between two phases."""
    after: float
    """Seconds since the start of the attempt."""
    steps: int
    """Finished steps at that time."""
    resumed: int = 0
    """Steps that the next attempt did not repeat."""
    lost: float = 0.0
    """Seconds of repeated work."""

    @property
    def phase(self) -> str:
        """The innermost phase. A phase of the background thread takes precedence over those of the loop."""
        background = [name for name in BACKGROUND if name in self.phases]
        return [*background, *self.phases[::-1], "between"][0]


@dataclass
class Outcome:
    """The result of a run that was killed several times."""

    kills: list[Kill]
    code: int
    """Exit code of the last attempt, which was not killed."""
    differences: list[str]
    """Differences to the undisturbed run."""
    left: bool
    """Whether a process of the run still exists."""
    attempts: list[Traced] = field(default_factory=list)
    twice: bool = False
    """Whether the run was killed twice in one epoch."""

    @property
    def identical(self) -> bool:
        return self.code == 0 and not self.differences and not self.left


def disturb(server: ForkServer, reference: Reference, folder: Path, aims: list[Aim], **environ: str) -> Outcome:
    """Run the words of `reference` in `folder`, kill the first attempts by `aims`, and let the last one end."""
    kills: list[Kill] = []
    attempts: list[Traced] = []
    begun: list[Forked] = []
    died: list[float] = []
    for aim in aims:
        stops = (aim.phase, aim.occurrence) if aim.share is None and not aim.operation else None
        trace = f"trace-{len(begun)}.jsonl"
        forked = server.start(reference.words, folder, trace, aim.operation, stops=stops, **environ)
        begun.append(forked)
        if aim.operation:
            code, at = forked.wait(), time.monotonic()
        elif stops:
            at = forked.kill(aim.alone) if forked.stopped() else time.monotonic()
            code = forked.wait()
        else:
            at = _kill_at(forked, aim, reference)
            code = forked.wait()
        attempts.append(Traced.read(forked.file))
        if code == -signal.SIGKILL:
            died.append(at)
            done = effective_steps(attempts)
            kills.append(Kill(aim, attempts[-1].inside(), at - forked.began, done[-1]["step"] + 1 if done else 0))
        else:  # it ended before the kill
            died.append(0.0)
            if code:
                return Outcome(kills, code, ["an attempt failed: " + tail(folder)], False, attempts)
    last = server.start(reference.words, folder, f"trace-{len(begun)}.jsonl", **environ)
    begun.append(last)
    code = last.wait()
    attempts.append(Traced.read(last.file))
    _fill_in_costs(kills, attempts, begun, died)
    left = any(forked.children_left() for forked in begun)
    if code:
        return Outcome(kills, code, [tail(folder)], left, attempts)
    return Outcome(kills, code, reference.ending.differences(Ending.of(folder / "run", attempts)), left, attempts)


def _kill_at(forked: Forked, aim: Aim, reference: Reference) -> float:
    """Wait for the moment of `aim`, which has a share, then kill. Returns the time of the kill."""
    assert aim.share is not None
    pause = aim.share * reference.seconds
    if aim.phase:
        spans = reference.trace.spans(aim.phase) or [(0.0, 0.0)]
        arrived = forked.until(aim.phase, aim.occurrence)
        begin, end = spans[min(aim.occurrence, len(spans)) - 1]
        pause = aim.share * (end - begin) * arrived
    time.sleep(pause)
    return forked.kill(aim.alone)


def _fill_in_costs(kills: list[Kill], attempts: list[Traced], begun: list[Forked], died: list[float]) -> None:
    """Fill in the cost of each kill: the time since the last step that the next attempt kept, or since the start."""
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
    """The end of the output of the runs in `folder`."""
    return (folder / "log.txt").read_text(errors="replace")[-characters:]


LEARNS = ("data.eval_fraction=0.1", "train.eval_every=6")
GROWS = (
    *LEARNS,
    "data.sources=[{path: texts.jsonl}]",
    "data.length_schedule=[[0.0,32],[0.3,64],[0.6,128]]",
    "checkpoint.every=1",
    "train.micro_batch_size=1",
    "train.global_batch_size=2",
    "train.epochs=1",
)
PAIRS = ("data.eval_fraction=0.2", "train.eval_every=6", "data.sources=[{path: pairs.jsonl}]")
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
    "early": (
        *("data.eval_fraction=0.15", "train.eval_every=3", "train.eval_share=0.999"),
        *("train.stop={patience: 2, min_delta: 100}", "schedule.name=wsd", "schedule.warmup_steps=1"),
        *("optimizer.name=lion", "optimizer.lr=0.1"),
    ),
    "growing": (*GROWS, "data.packing=true", "techniques.attention.enabled=true"),
    "growing-padded": (*GROWS, "data.packing=false"),
    "dpo": (*PAIRS, "objective=dpo", "objective.reference=start", "techniques.lora.dropout=0.1"),
    "dpo-stored": (*PAIRS, "objective=dpo", "objective.reference=stored", "techniques.lora.enabled=false"),
    "kto": (*PAIRS, "objective=kto", "data.sources=[{path: judged.jsonl}]"),
    "reward": (*PAIRS, "objective=reward"),
    "classifier": (*PAIRS, "objective=classification", "data.sources=[{path: labelled.jsonl}]", "checkpoint.every=1"),
    "embedding": (
        *PAIRS,
        *("objective=embedding", "data.sources=[{path: triplets.jsonl}]", "techniques.lora.dropout=0.1"),
        *("data.packing=true", "data.sequence_length=256", "train.epochs=6", "checkpoint.every=1"),
    ),
    "distilled": (
        *LEARNS,
        "objective=distillation",
        "objective.teacher=base",
        "objective.text_weight=0.5",
        "checkpoint.every=1",
    ),
    "images": (
        "model.init=pretrained",
        "model.path=model",
        "model.architecture={}",
        "data.sources=[{path: pictures/rows.jsonl}]",
        "data.questions={path: pictures/rows.jsonl, limit: 4, max_new_tokens: 4}",
        "data.on_overlap=keep",
        "data.packing=true",
        "data.eval_fraction=0.2",
        "train.epochs=3",
        "loader.num_workers=2",
        "techniques.lora.dropout=0.1",
    ),
    "hybrid": (
        *LEARNS,
        "model.architecture={model_type:qwen3_5_text,vocab_size:1024,hidden_size:32,intermediate_size:64,"
        "num_hidden_layers:2,layer_types:[linear_attention,full_attention],num_attention_heads:2,"
        "num_key_value_heads:1,head_dim:16,linear_num_key_heads:1,linear_num_value_heads:2,linear_key_head_dim:16,"
        "linear_value_head_dim:16}",
        "data.packing=true",
        "checkpoint.every=2",
        "train.max_steps=8",
    ),
    "mixture": (QWEN3_MOE, *ON_EXPERTS, *LEARNS),
    "rollouts": (
        *("objective=policy", "objective.rewards=[{name: length, options: {most: 12}}]", "objective.patience=99"),
        *("data.sources=[{path: prompts.jsonl}]", "sampler.answers=3", "sampler.max_tokens=12", "sampler.batch=8"),
        *("train.max_steps=5", "checkpoint.every=2", "train.micro_batch_size=1", "techniques.lora.dropout=0.1"),
    ),
    "compiled": ("techniques.compile.enabled=true", "data.buckets=[128]", "train.max_steps=12"),
}
"""Words in addition to command(). The first three modes evaluate and so also save at other steps."""


def prepare(folder: Path, mode: str) -> list[str]:
    """Create `folder` with the files of `mode`, and return the words of its run."""
    folder.mkdir(parents=True)
    write_chats(folder / "questions.jsonl", 4, seed=1)
    write_preferences(folder / "pairs.jsonl", folder / "judged.jsonl")
    write_companions(folder / "labelled.jsonl", folder / "triplets.jsonl")
    if mode == "images":
        write_model("qwen2_5_vl", folder / "model")
        write_picture_rows(folder / "pictures")
    if mode.startswith("growing"):
        write_texts(folder / "texts.jsonl")
    if mode == "rollouts":
        prompts = [json.dumps({"prompt": f"Tell me about {number}."}) for number in range(8)]
        (folder / "prompts.jsonl").write_text("\n".join(prompts))
    if mode == "tokenisers":
        write_chats(folder / "many.jsonl", 20_000)  # several shards, so that worker processes start
    return command(folder, *MODES[mode])
