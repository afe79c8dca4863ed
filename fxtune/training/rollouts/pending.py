"""A step whose rollouts are not complete: its answers are being sampled and scored, perhaps while another step is
trained."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

from fxtune.training.rollouts.folder import Answer, Asked
from fxtune.training.rollouts.plan import RolloutPlan
from fxtune.training.rollouts.scoring import Group, Scores

Result = TypeVar("Result")


@dataclass(frozen=True)
class Scored:
    """The answers of a step, with their scores."""

    answers: list[Answer]
    groups: list[Group]
    scores: list[Scores]
    sync_seconds: float
    """The seconds in which the sampler got the weights."""
    sampling_seconds: float
    reward_seconds: float


@dataclass(frozen=True)
class PendingStep:
    plan: RolloutPlan
    step: int
    version: str
    """The weights that sample the step."""
    asked: list[Asked]
    result: Callable[[], Scored]
    """Waits for the scored answers, on rank 0."""


class Background:
    """A thread that does one piece of work after the other. The end of the process does not wait for it. The thread
    lives as long as the process, because a process that it starts ends with it."""

    def __init__(self) -> None:
        self._waiting = SimpleQueue[tuple[Future[Any], Callable[[], Any]]]()
        Thread(target=self._run, name="fxtune-rollouts", daemon=True).start()

    def begin(self, work: Callable[[], Result]) -> Callable[[], Result]:
        """Returns a function that waits for the result of work()."""
        future = Future[Result]()
        self._waiting.put((future, work))
        return future.result

    def _run(self) -> None:
        while True:
            future, work = self._waiting.get()
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001  it is raised where the result is wanted
                future.set_exception(error)
