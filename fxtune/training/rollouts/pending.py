"""A step whose rollouts are not complete: its answers are being sampled and scored, perhaps while another step is
trained.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Thread
from typing import TypeVar

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


def in_background(work: Callable[[], Result]) -> Callable[[], Result]:
    """Begin work() in a thread. Returns a function that waits for its result. The end of the process does not wait."""
    future = Future[Result]()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001  it is raised where the result is wanted
            future.set_exception(error)

    Thread(target=run, name="fxtune-rollouts", daemon=True).start()
    return future.result
