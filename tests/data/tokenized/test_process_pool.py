"""Processes that give results in order: real ones, killed where a queue that they shared would wait for ever."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from functools import partial

import pytest

from fxtune.data.tokenized.process_pool import MAX_WAITING, WorkerDied, map_in_order

LARGE = 2**24
"""Bytes, many times what a pipe takes before somebody reads."""


def times(factor):
    return partial(slowly, factor)


def slowly(factor, task):
    time.sleep(0.02 * (task % 3))  # so that they end in another order
    if task == 13:
        raise ValueError("thirteen")
    return factor * task


def letters(_):
    return bytes


def dying(_):
    return lambda task: os.kill(os.getpid(), signal.SIGKILL) if task == 2 else task


def children():
    return multiprocessing.active_children()


@pytest.mark.parametrize("processes", [1, 3])
def test_results_come_in_order_of_tasks_that_are_drawn_as_they_are_needed(processes):
    drawn = []
    results = map_in_order(times, 2, (drawn.append(task) or task for task in range(12)), processes)
    assert next(results) == 0
    assert len(drawn) <= processes + MAX_WAITING + 1
    assert [0, *results] == list(range(0, 24, 2))
    assert not children()


def test_nothing_to_do_is_nothing():
    assert not list(map_in_order(times, 1, [], 2))


def test_what_a_task_raises_is_raised_in_its_place():
    results = map_in_order(times, 1, range(10, 16), 2)
    assert [next(results) for _ in range(3)] == [10, 11, 12]
    with pytest.raises(ValueError, match="thirteen") as raised:
        next(results)
    assert "in slowly" in raised.value.__notes__[0]
    assert not children()


def test_one_that_is_killed_half_way_through_its_result_is_told_at_once():
    results = map_in_order(letters, None, [LARGE] * 9, 2)
    assert len(next(results)) == LARGE
    time.sleep(0.5)  # both are writing, and nobody reads
    os.kill(children()[0].pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(WorkerDied):
        list(results)
    assert time.monotonic() - began < 10
    assert not children()


def test_one_that_dies_at_its_task_is_told():
    with pytest.raises(WorkerDied):
        list(map_in_order(dying, None, range(4), 2))


def test_an_iterator_that_is_dropped_ends_its_processes():
    results = map_in_order(letters, None, [LARGE] * 9, 2)
    next(results)
    assert len(children()) == 2
    results.close()
    assert not children()
