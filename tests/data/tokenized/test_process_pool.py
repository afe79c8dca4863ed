"""Worker processes return results in order, and a killed one raises an error where a shared queue would block forever."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from functools import partial

import pytest

from fxtune.data.tokenized.process_pool import MAX_WAITING, WorkerDied, map_in_order

LARGE = 2**24
"""Bytes, many times a pipe's buffer."""


def times(factor):
    return partial(slowly, factor)


def slowly(factor, task):
    time.sleep(0.02 * (task % 3))  # so that tasks end in another order
    if task == 13:
        raise ValueError("thirteen")
    return factor * task


def letters(_):
    return bytes


def dying(_):
    return lambda task: os.kill(os.getpid(), signal.SIGKILL) if task == 2 else task


@pytest.fixture
def children():
    """Return a function that lists the child processes that this test started and that live.

    An earlier test of the same process may have left one running: the plain reference keeps its own.
    """
    earlier = set(multiprocessing.active_children())
    return lambda: [child for child in multiprocessing.active_children() if child not in earlier]


@pytest.mark.parametrize("processes", [1, 3])
def test_results_keep_task_order_and_few_tasks_are_drawn_ahead(processes, children):
    drawn = []
    results = map_in_order(times, 2, (drawn.append(task) or task for task in range(12)), processes)
    assert next(results) == 0
    assert len(drawn) <= processes + MAX_WAITING + 1
    assert [0, *results] == list(range(0, 24, 2))
    assert not children()


def test_no_tasks_give_no_results():
    assert not list(map_in_order(times, 1, [], 2))


def test_task_error_is_raised_in_its_place(children):
    results = map_in_order(times, 1, range(10, 16), 2)
    assert [next(results) for _ in range(3)] == [10, 11, 12]
    with pytest.raises(ValueError, match="thirteen") as raised:
        next(results)
    assert "in slowly" in raised.value.__notes__[0]
    assert not children()


def test_worker_killed_while_sending_raises_worker_died(children):
    results = map_in_order(letters, None, [LARGE] * 9, 2)
    assert len(next(results)) == LARGE
    time.sleep(0.5)  # both workers are blocked in writing
    os.kill(children()[0].pid, signal.SIGKILL)
    with pytest.raises(WorkerDied):
        list(results)
    assert not children()


def test_worker_that_dies_in_a_task_raises_worker_died():
    with pytest.raises(WorkerDied):
        list(map_in_order(dying, None, range(4), 2))


def test_closing_the_iterator_ends_its_processes(children):
    results = map_in_order(letters, None, [LARGE] * 9, 2)
    next(results)
    assert len(children()) == 2
    results.close()
    assert not children()
