"""How long a run has taken, over all its processes: in total, in training, in evaluations, and a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager


class RunClock:
    """The clock of one process of a run. load() adds the time of earlier processes."""

    def __init__(self, before: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        """`before`: seconds that this process took before."""
        self._clock = clock
        self._began = clock() - before
        self._loop: float | None = None
        """When the loop began; None before."""
        self._ended: float | None = None
        """When it ended; None before."""
        self._earlier = {"seconds": 0.0, "training": 0.0, "evaluating": 0.0}
        self.evaluating = 0.0
        """Seconds of evaluations in this process."""
        self.takes = {"evaluation": 0.0, "questions": 0.0, "saving": 0.0}
        """How long each of these took the last time."""
        self._begin = 0
        """Steps done when the loop began."""
        self._first = self._last = (0, 0.0)
        """Steps done, and the seconds of training without evaluations, at the first and the last counted step."""
        self._warm = False

    def load(self, state: Mapping[str, float]) -> None:
        """Restore the state() of an earlier process."""
        self._earlier = {name: float(state.get(name, 0.0)) for name in self._earlier}
        self.takes = {name: float(state.get(name, 0.0)) for name in self.takes}

    def state(self) -> dict[str, float]:
        """What load() takes."""
        total = {"seconds": self.seconds, "training": self.training, "evaluating": self._all_evaluating}
        return {name: round(value, 3) for name, value in {**total, **self.takes}.items()}

    def figures(self) -> dict[str, float]:
        """The run's time so far in seconds: in all, of the loop, and of evaluations, which are part of the loop."""
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
        """Seconds of the loop so far, evaluations and saves included."""
        now = self._clock() if self._ended is None else self._ended
        return self._earlier["training"] + (0.0 if self._loop is None else now - self._loop)

    @property
    def evaluation_share(self) -> float:
        """The share of the loop's time that evaluations took, 0 to 1."""
        return self._all_evaluating / max(self.training, self._all_evaluating, 1e-9)

    @property
    def _all_evaluating(self) -> float:
        return self._earlier["evaluating"] + self.evaluating

    def start(self, step: int) -> None:
        """The loop begins, after `step` steps."""
        self._loop, self._begin = self._clock(), step
        self._first = self._last = (step, 0.0)

    def stop(self) -> None:
        """The loop ends."""
        self._ended = self._clock()

    def reached(self, step: int) -> None:
        """Note that `step` steps are done, on the device as well."""
        if self._loop is None or step <= self._last[0]:
            return
        self._last = (step, self._clock() - self._loop - self.evaluating)
        if not self._warm:
            self._first, self._warm = self._last, True  # what comes before includes compilation and warm-up

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """The body is an evaluation."""
        try:
            with self.timed("evaluation"):
                yield
        finally:
            self.evaluating += self.takes["evaluation"]

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Note in `takes` how long the body takes."""
        began = self._clock()
        try:
            yield
        finally:
            self.takes[part] = self._clock() - began

    @property
    def step_seconds(self) -> float | None:
        """A step's time, with saves and without evaluations; None before this process has measured one."""
        if self._last[0] <= self._first[0]:
            return None
        return (self._last[1] - self._first[1]) / (self._last[0] - self._first[0])

    @property
    def first_step_seconds(self) -> float | None:
        """A step's time up to the first counted step, with what only first steps take; None before."""
        steps, seconds = self._first
        return seconds / (steps - self._begin) if self._warm else None
