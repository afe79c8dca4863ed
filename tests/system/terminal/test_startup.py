"""The start of a run is divided into the parts that phases name, and the parts add up to all of it."""

from __future__ import annotations

import gc
import threading

import pytest

from fxtune.system.terminal.startup import FIRST_STEPS, StartupTimer


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def timer() -> tuple[StartupTimer, Clock]:
    clock = Clock()
    return StartupTimer(clock), clock


def test_a_part_inside_another_is_counted_once():
    startup, clock = timer()
    startup.begin({"imports": 4.0})
    clock.now += 0.1
    with startup.part("checks"):
        clock.now += 2
        with startup.part("package checks"):
            clock.now += 15
        clock.now += 1
    with startup.part("imports"):
        clock.now += 5
    assert {part: round(seconds, 1) for part, seconds in startup.read().items()} == {
        "imports": 9.0,
        "other": 0.1,
        "checks": 3.0,
        "package checks": 15.0,
    }
    assert startup.summary() == "from the start to here: 27 s (imports 9, checks 3, package checks 15)"


def test_only_the_first_run_of_a_command_counts_from_its_start():
    startup, clock = timer()
    clock.now += 3600
    startup.begin_run()
    assert sum(startup.read().values()) == 0.0, "in a notebook a run begins where it is called"
    startup.begin({"imports": 4.0})
    startup.begin_run()
    clock.now += 1
    assert sum(startup.read().values()) == 5.0
    with startup.part("model"):
        clock.now += 1
        startup.begin_run()
        clock.now += 2
    assert startup.read() == {"model": 2.0, "other": 0.0}


def test_a_part_that_another_thread_works_on_is_not_counted_twice():
    startup, clock = timer()
    startup.begin({})

    def beside() -> None:
        with startup.part("data"):
            clock.now += 3

    with startup.part("model"):
        thread = threading.Thread(target=beside)
        thread.start()
        thread.join()
    assert startup.read() == {"other": 0.0, "model": 3.0}


def test_garbage_is_collected_seldom_before_the_first_step_only():
    startup, usual = timer()[0], gc.get_threshold()
    with startup.part("model"):
        assert gc.get_threshold()[0] > 10 * usual[0]
        with startup.part("proofs"):
            pass
        assert gc.get_threshold()[0] > 10 * usual[0]
    with pytest.raises(KeyError), startup.part("checks"):
        raise KeyError
    with startup.part(FIRST_STEPS):
        assert gc.get_threshold() == usual
    assert gc.get_threshold() == usual
