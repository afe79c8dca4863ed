"""Measures how long a run has taken over all its processes: in total, in training, in evaluations, and per step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager


class RunClock:
    """The clock of one process of a run. load() adds the time of earlier processes."""

    def __init__(self, before: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        """`before`: seconds that this process ran before the clock was made."""
        self._clock = clock
        self._began = clock() - before
        self._loop_began: float | None = None
        """When the training loop began; None before start()."""
        self._loop_ended: float | None = None
        """When the training loop ended; None before stop()."""
        self._earlier = {"seconds": 0.0, "training": 0.0, "evaluating": 0.0}
        self.evaluating = 0.0
        """Seconds of evaluations in this process."""
        self.last_seconds = {"evaluation": 0.0, "questions": 0.0, "general": 0.0, "saving": 0.0}
        """How long the last evaluation, the last questions, the last pass over general text and the last save took."""
        self._start_step = 0
        """How many steps were done when the training loop began."""
        self._first = self._last = (0, 0.0)
        """At the first and at the last counted step: how many steps were done, and the seconds of training without
        evaluations."""
        self._counted = False
        """Whether this process has counted a step."""

    def load(self, state: Mapping[str, float]) -> None:
        """Restore the state() of an earlier process."""
        self._earlier = {name: float(state.get(name, 0.0)) for name in self._earlier}
        self.last_seconds = {name: float(state.get(name, 0.0)) for name in self.last_seconds}

    def state(self) -> dict[str, float]:
        """The state that load() restores in the run's next process."""
        total = {"seconds": self.seconds, "training": self.training, "evaluating": self._all_evaluating}
        return {name: round(value, 3) for name, value in {**total, **self.last_seconds}.items()}

    def figures(self) -> dict[str, float]:
        """Seconds so far of the run, of the training loop within the run, and of the evaluations within the training
        loop."""
        return {
            "time/total_seconds": self.seconds,
            "time/training_seconds": self.training,
            "time/evaluation_seconds": self._all_evaluating,
        }

    @property
    def seconds(self) -> float:
        """Seconds of the run so far, start-up included."""
        return self._earlier["seconds"] + self._clock() - self._began

    @property
    def training(self) -> float:
        """Seconds of the training loop so far, evaluations and saves included."""
        now = self._clock() if self._loop_ended is None else self._loop_ended
        return self._earlier["training"] + (0.0 if self._loop_began is None else now - self._loop_began)

    @property
    def evaluation_share(self) -> float:
        """The share of the training loop's time that evaluations took, 0 to 1."""
        return self._all_evaluating / max(self.training, self._all_evaluating, 1e-9)

    @property
    def _all_evaluating(self) -> float:
        return self._earlier["evaluating"] + self.evaluating

    def start(self, step: int) -> None:
        """Note that the training loop begins after `step` steps."""
        self._loop_began, self._start_step = self._clock(), step
        self._first = self._last = (step, 0.0)

    def stop(self) -> None:
        self._loop_ended = self._clock()

    def reached(self, step: int) -> None:
        """Note that the device has finished `step` steps."""
        if self._loop_began is None or step <= self._last[0]:
            return
        self._last = (step, self._clock() - self._loop_began - self.evaluating)
        if not self._counted:
            self._first, self._counted = self._last, True  # the steps up to here include compilation and warm-up

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """A context whose body is timed as an evaluation."""
        try:
            with self.timed("evaluation"):
                yield
        finally:
            self.evaluating += self.last_seconds["evaluation"]

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """A context that notes in `last_seconds` how long its body takes."""
        began = self._clock()
        try:
            yield
        finally:
            self.last_seconds[part] = self._clock() - began

    @property
    def step_seconds(self) -> float | None:
        """Mean seconds of a step after the first counted step, with saves and without evaluations; None before the
        second counted step."""
        if self._last[0] <= self._first[0]:
            return None
        return (self._last[1] - self._first[1]) / (self._last[0] - self._first[0])

    @property
    def first_step_seconds(self) -> float | None:
        """Mean seconds of a step up to the first counted step, with compilation and warm-up; None before that step."""
        steps, seconds = self._first
        return seconds / (steps - self._start_step) if self._counted else None
