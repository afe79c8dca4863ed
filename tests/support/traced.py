"""Writes a trace of a run, so that a test that kills it knows what it was doing. This module runs inside the run's
process.

`watch(file)` wraps public functions of fxtune. Each trace line is one system call, so it survives SIGKILL. The trace
does not change the run's results. `serve()` is a parent process that has imported all packages and forks one child per
requested run, which saves the five seconds of imports. The child runs `fxtune.cli.main.main` and starts its workers as
usual; it skips only Python's start and the imports.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import hashlib
import importlib
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

STOP = "FXTUNE_TEST_STOP"
"""Environment variable `PHASE@N`: the run stops itself with SIGSTOP when it enters the phase for the N-th time, or
leaves it with `after PHASE@N`. So it cannot go on before the test, which may be slow, has sent its signal."""


class Trace:
    """Lines of JSON, each with the time `at` of a clock that all processes share."""

    def __init__(self, file: str) -> None:
        self.descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.stop, _, number = os.environ.pop(STOP, "").partition("@")
        self.left, self.process = int(number or 0), os.getpid()

    def write(self, **line: Any) -> None:
        os.write(self.descriptor, (json.dumps({"at": time.monotonic(), **line}) + "\n").encode())
        if self.stop in (line.get("enter"), f"after {line.get('leave')}") and os.getpid() == self.process:
            self.left -= 1
            if self.left == 0:
                signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # this thread goes no further

    def phase(self, owner: Any, name: str, phase: str) -> None:
        """Wrap `owner.name` so that it writes a line at its start and end."""
        inner = getattr(owner, name)

        @functools.wraps(inner)
        def wrapped(*given: Any, **named: Any) -> Any:
            self.write(enter=phase)
            try:
                return inner(*given, **named)
            finally:
                self.write(leave=phase)

        setattr(owner, name, wrapped)


OPERATIONS = {
    *("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link", "os.symlink", "shutil.rmtree"),
}
"""Audit events of Python that change a folder. `open` for writing is added below."""


def watch(file: str, last_operation: int = 0) -> None:
    """Write a trace of this process to `file`: its phases, and the documents of each step.

    It also counts file operations below the working directory, and kills itself with SIGKILL before number
    `last_operation`. Writes inside safetensors are not counted, but renaming its file and making its folder are.
    """
    from torch._dynamo import callback

    from fxtune.checkpoint import folder
    from fxtune.checkpoint.manager import Checkpoints
    from fxtune.checkpoint.run_folder import RunFolder
    from fxtune.data.batches import build
    from fxtune.training import evaluation, trainer
    from fxtune.training.answers import AnswerEvaluation
    from fxtune.training.builder import RunBuilder
    from fxtune.training.rollouts.folder import Rollouts
    from fxtune.training.rollouts.sampler import ModelSampler
    from fxtune.training.rollouts.scoring import RewardWorkers
    from fxtune.training.run import export as run_export

    trace = Trace(file)
    trace.write(enter="starting")
    sys.addaudithook(_Operations(trace, os.getcwd(), last_operation))
    init = trainer.Trainer.__init__

    def initialized(*given: Any, **named: Any) -> None:
        init(*given, **named)
        trace.write(leave="starting")

    trainer.Trainer.__init__ = initialized  # type: ignore[method-assign]
    for owner, name, phase in (
        (build, "tokenize", "tokenising"),
        (RunBuilder, "build", "building"),
        (RunBuilder, "observe", "proving"),
        (evaluation, "evaluate", "evaluating"),
        (AnswerEvaluation, "ask", "asking"),
        (ModelSampler, "sample", "sampling"),
        (RewardWorkers, "score", "scoring"),
        (Rollouts, "finish", "storing"),
        (Checkpoints, "load_newest", "loading"),
        (Checkpoints, "save", "copying"),
        (folder, "write", "saving"),
        (folder, "remove", "pruning"),
        (run_export, "save_model", "exporting"),
        (RunFolder, "finish", "finishing"),
    ):
        trace.phase(owner, name, phase)
    compiling = callback.callback_handler  # its list of callbacks would be emptied by torch._dynamo.reset()
    compiling.run_start_callbacks = lambda _: trace.write(enter="compiling")  # type: ignore[method-assign]
    compiling.run_end_callbacks = lambda _: trace.write(leave="compiling")  # type: ignore[method-assign]
    trainer.Steps.take = _step(trainer.Steps.take, trace)  # type: ignore[method-assign]


class _Operations:
    """An audit hook. Python calls it before each operation."""

    def __init__(self, trace: Trace, below: str, last: int) -> None:
        self.trace, self.below, self.last, self.main = trace, below, last, os.getpid()
        self.count = 0

    def __call__(self, event: str, given: tuple[Any, ...]) -> None:
        writing = event == "open" and isinstance(given[2], int) and given[2] & (os.O_WRONLY | os.O_RDWR)
        if (
            not (writing or event in OPERATIONS)
            or not isinstance(given[0], (str, os.PathLike))
            or os.getpid() != self.main
        ):
            return
        path = os.path.abspath(given[0])
        if path.startswith(self.below + os.sep):
            self.count += 1
            self.trace.write(operation=self.count, what=f"{event} {os.path.relpath(path, self.below)}")
            if self.count == self.last:
                os.kill(self.main, signal.SIGKILL)


def _step(inner: Callable[..., Any], trace: Trace) -> Callable[..., Any]:
    """Wrap Steps.take to write the documents of its batches and the random state after it."""
    import torch

    def step(self: Any, given: Any, lr: float) -> Any:
        seen: list[list[str]] = []

        def recorded(batches: Iterator[Any]) -> Iterator[Any]:
            for batch in batches:
                seen.append(documents(batch))
                yield batch

        trace.write(enter="training")
        outcome = inner(self, dataclasses.replace(given, micro_batches=recorded(given.micro_batches)), lr)
        state = hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()[:16]
        trace.write(leave="training", step=given.index, documents=seen, random=state)
        return outcome

    return step


def documents(batch: Any) -> list[str]:
    """A name for each document of a micro-batch: a hash of its tokens up to the last target, and of its targets."""
    found = []
    rows = (tensor.tolist() for tensor in (batch.input_ids, batch.position_ids, batch.targets))
    for ids, positions, targets in zip(*rows, strict=True):
        starts = [at for at, position in enumerate(positions) if position == 0 or at == 0]  # a piece may begin inside
        for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
            supervised = [at for at in range(start, end) if targets[at] != -100]
            if supervised:  # otherwise it is padding of a packed row
                seen = ids[start : supervised[-1] + 1], targets[start : supervised[-1] + 1]
                found.append(hashlib.sha256(json.dumps(seen).encode()).hexdigest()[:12])
    return found


def serve() -> None:
    """Read requests from stdin, one line each: {argv, cwd, log, trace, last_operation, environ, function}. `function`,
    "module:name", is called in place of fxtune's main function.

    Answers {started: pid} at the start of a run and {ended: pid, status} at its end. Several runs may go on at a time.
    The end of stdin ends them.
    """
    gc.disable()  # the imports create many permanent objects
    import peft
    import transformers.models.llama.modeling_llama  # noqa: F401  so that no child imports it

    import fxtune.cli.main
    import fxtune.training.trainer  # noqa: F401

    assert peft
    gc.freeze()
    gc.enable()
    print(json.dumps({"ready": True}), flush=True)
    requests, events, running = sys.stdin.buffer.raw, select.poll(), dict[int, int]()
    events.register(0, select.POLLIN)
    while True:
        for descriptor, _ in events.poll():
            if child := running.pop(descriptor, 0):
                events.unregister(descriptor)
                os.close(descriptor)
                _, status = os.waitpid(child, 0)
                print(json.dumps({"ended": child, "status": os.waitstatus_to_exitcode(status)}), flush=True)
            elif line := requests.readline():
                request = json.loads(line)
                if (child := os.fork()) == 0:
                    for other in running:
                        os.close(other)
                    _become_run(request)
                    module, _, name = request["function"].partition(":")
                    # As in a user's process, fxtune's main() reads sys.argv.
                    words = [] if request["function"] == "fxtune.cli.main:main" else [request["argv"]]
                    sys.exit(getattr(importlib.import_module(module), name)(*words))
                _own_group(child)
                running[ended := os.pidfd_open(child)] = child  # it can be read when the child has ended
                events.register(ended, select.POLLIN)
                print(json.dumps({"started": child}), flush=True)
            else:
                for child in running.values():
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(child, signal.SIGKILL)
                return


def _own_group(pid: int) -> None:
    """Give the child its own process group. Parent and child both call this, so neither has to wait for the other."""
    with contextlib.suppress(PermissionError, ProcessLookupError):
        os.setpgid(pid, pid)


def _become_run(request: dict[str, Any]) -> None:
    from support import injected

    _own_group(os.getpid())
    os.chdir(request["cwd"])
    os.environ.update(request["environ"])
    sys.argv = ["fxtune", *request["argv"]]
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    watch(request["trace"], request["last_operation"])
    injected.install()


if __name__ == "__main__":  # one run in this process: traced.py TRACE key=value ...
    import fxtune.cli.main

    watch(sys.argv[1])
    sys.argv = ["fxtune", *sys.argv[2:]]
    sys.exit(fxtune.cli.main.main())
