"""The clock of a run that several processes train."""

from __future__ import annotations

import itertools

import pytest

from fxtune.training.monitors.clock import RunClock


class Time:
    """A clock that stands still unless it is moved."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_steps_are_measured_without_the_first_one_and_without_evaluations():
    time = Time()
    clock = RunClock(before=5.0, clock=time)
    time.now += 10
    clock.start(step=3)
    assert clock.step_seconds is clock.first_step_seconds is None
    for step, seconds in zip(itertools.count(4), (60, 2, 2, 2)):  # the first one compiles
        time.now += seconds
        clock.reached(step)
        with clock.evaluation():
            time.now += 1
    assert (clock.step_seconds, clock.first_step_seconds) == (2.0, 60.0)
    assert clock.last_seconds["evaluation"] == 1.0
    assert (clock.seconds, clock.training) == (85.0, 70.0)
    assert clock.evaluation_share == pytest.approx(4 / 70)


def test_next_process_goes_on_with_the_time_of_the_one_before():
    time = Time()
    first = RunClock(clock=time)
    first.start(0)
    time.now += 30
    with first.evaluation():
        time.now += 10
    second = RunClock(before=1.0, clock=time)
    second.load(first.state())
    time.now += 5
    assert (second.seconds, second.training, second.last_seconds["evaluation"]) == (46.0, 40.0, 10.0)
    assert second.evaluation_share == 0.25
