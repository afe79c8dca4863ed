"""Faults that one rank of a run meets. This module runs inside the run's process (traced.py).

`FXTUNE_TEST_FAULT=NAME` or `NAME@STEP` in the environment of a rank installs one. STEP counts from 1.
"""

from __future__ import annotations

import errno
import functools
import math
import os
import signal
from collections.abc import Callable
from typing import Any

import torch

VARIABLE = "FXTUNE_TEST_FAULT"


def install() -> None:
    """Install the fault that the environment names, if it names one."""
    name, _, step = os.environ.pop(VARIABLE, "").partition("@")
    if name:
        FAULTS[name](int(step or 5))


def _before(owner: Any, name: str, act: Callable[..., Any]) -> None:
    """Call act(*given) before each call of `owner.name`."""
    inner = getattr(owner, name)

    @functools.wraps(inner)
    def wrapped(*given: Any, **named: Any) -> Any:
        act(*given)
        return inner(*given, **named)

    setattr(owner, name, wrapped)


def _once_in_step(step: int) -> Callable[[], bool]:
    """Whether training is in `step`, true once."""
    from fxtune.training.steps import Steps

    now, done = [0], []
    _before(Steps, "take", lambda _, given, lr: now.__setitem__(0, given.index + 1))

    def asked() -> bool:
        if done or now[0] != step:
            return False
        done.append(True)
        return True

    return asked


def _no_memory(*_: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def _forward(step: int) -> None:
    from fxtune.objectives.language_model import LanguageModel

    now = _once_in_step(step)
    _before(LanguageModel, "summed_loss", lambda *_: _no_memory() if now() else None)


def _backward(step: int) -> None:
    """Memory runs out after the first micro-batch has left its gradients."""
    from fxtune.training.step import TrainStep

    now, inner = _once_in_step(step), TrainStep._pass

    def passed(*given: Any) -> Any:
        result = inner(*given)
        return _no_memory() if now() else result

    TrainStep._pass = passed  # type: ignore[method-assign]


def _update(step: int) -> None:
    from fxtune.optim.optimizer import Optimizer

    now = _once_in_step(step)
    _before(Optimizer, "step", lambda *_: _no_memory() if now() else None)


def _loss_times(factor: float, step: int) -> None:
    from fxtune.objectives.language_model import LanguageModel

    now, inner = _once_in_step(step), LanguageModel.summed_loss
    LanguageModel.summed_loss = lambda *given: inner(*given) * (factor if now() else 1.0)  # type: ignore[method-assign]


def _bad_row(step: int) -> None:
    """The table of tokens cannot be read."""
    from fxtune.data.batches import loader
    from fxtune.errors import DataError

    calls = [0]

    def count(*_: Any) -> None:
        calls[0] += 1
        if calls[0] >= step:
            raise DataError("cache/tokens.bin cannot be read: Input/output error.")

    _before(loader._BatchDataset, "__getitem__", count)


def _dead_worker(step: int) -> None:
    """The processes that build batches are killed in this step."""
    import multiprocessing

    now = _once_in_step(step)

    def end(*_: Any) -> None:
        for child in multiprocessing.active_children() if now() else ():
            child.kill()

    from fxtune.training.step import TrainStep

    _before(TrainStep, "backward", end)


def _full_disk(_: int) -> None:
    from fxtune.checkpoint import folder

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    _before(folder, "write", refuse)


def _missing_file(_: int) -> None:
    """A weight file is not on this host's disk."""
    from fxtune.errors import StorageError
    from fxtune.training.builder import RunBuilder

    def refuse(*_: Any) -> None:
        raise StorageError("/models/base/model.safetensors does not exist on this host.")

    _before(RunBuilder, "build", refuse)


def _bug(step: int) -> None:
    from fxtune.training.step import TrainStep

    now = _once_in_step(step)

    def fail(*_: Any) -> None:
        if now():
            raise KeyError("a bug")

    _before(TrainStep, "backward", fail)


def _signal(number: signal.Signals, step: int) -> None:
    """The rank gets a signal in this step: it cannot have ended before, as if a test sent it."""
    from fxtune.training.step import TrainStep

    now = _once_in_step(step)
    _before(TrainStep, "backward", lambda *_: os.kill(os.getpid(), number) if now() else None)


def _packages(_: int) -> None:
    from fxtune.distributed import world

    inner = world.installed_packages
    world.installed_packages = lambda: {**inner(), "peft": "0.0.1"}


FAULTS: dict[str, Callable[[int], None]] = {
    "forward": _forward,
    "backward": _backward,
    "update": _update,
    "not finite": functools.partial(_loss_times, math.nan),
    "spike": functools.partial(_loss_times, 30.0),
    "bad row": _bad_row,
    "dead worker": _dead_worker,
    "full disk": _full_disk,
    "missing file": _missing_file,
    "bug": _bug,
    "packages": _packages,
    "SIGKILL": functools.partial(_signal, signal.SIGKILL),
    "SIGTERM": functools.partial(_signal, signal.SIGTERM),
}
