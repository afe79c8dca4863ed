"""Processes that work through a sequence of tasks and give their results in its order.

Each has a pipe of its own to the main process. Where processes share a queue, as those of a ProcessPoolExecutor do, one that is
killed half-way through a result of megabytes leaves the main process reading the rest of it for ever, and one that is killed
with the queue's lock leaves the others waiting. At the end of a pipe of one's own there is nobody but the process: it ends when
that does, whatever was under way.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from fxtune.system.signals import leave_signals_to_main_process

Task = TypeVar("Task")
Result = TypeVar("Result")

AHEAD = 2
"""Results that may wait for an earlier one, beside a task for each process: what bounds the memory."""


class WorkerDied(Exception):
    """A process was killed, or left, before its result was there."""


def in_order(
    prepare: Callable[[Any], Callable[[Task], Result]], given: Any, tasks: Iterable[Task], processes: int
) -> Iterator[Result]:
    """`prepare(given)(task)` for each of `tasks`, by so many processes, which are started anew (spawn) and end with the iterator.

    `prepare`, at the top of a module, is called once a process. What it or a task raises is raised here, for the first task that
    it happened to. Raises WorkerDied.
    """
    context = multiprocessing.get_context("spawn")
    pipes: dict[Any, BaseProcess] = {}
    under_way: dict[Any, int] = {}
    results: dict[int, tuple[bool, Any]] = {}
    queue, wanted, given_out = enumerate(tasks), 0, 0
    try:
        for _ in range(processes):
            ours, theirs = context.Pipe()
            pipes[ours] = context.Process(target=_work, args=(theirs, prepare, given), daemon=True)
            pipes[ours].start()
            theirs.close()  # or the pipe would not end with the process
        while True:
            idle = [pipe for pipe in pipes if pipe not in under_way]
            room = min(len(idle), wanted + processes + AHEAD - given_out)
            for (index, task), pipe in zip(islice(queue, room), idle, strict=False):
                _tell(pipe, task)
                under_way[pipe], given_out = index, index + 1
            if wanted in results:
                good, result = results.pop(wanted)
                if not good:
                    raise result
                yield result
                wanted += 1
            elif under_way:
                for pipe in wait(list(under_way)):
                    results[under_way.pop(pipe)] = _heard(pipe)
            else:
                return
    finally:
        for pipe, process in pipes.items():
            if process.pid is not None:
                process.kill()  # it holds nothing that would be lost
                process.join()
            pipe.close()


def _tell(pipe: Any, task: Any) -> None:
    try:
        pipe.send(task)
    except OSError as problem:
        raise WorkerDied from problem


def _heard(pipe: Any) -> tuple[bool, Any]:
    try:
        good, result = pipe.recv()
        return good, result
    except (EOFError, OSError) as problem:
        raise WorkerDied from problem


def _work(pipe: Any, prepare: Callable[[Any], Callable[[Any], Any]], given: Any) -> None:
    """A process."""
    leave_signals_to_main_process()
    parent = multiprocessing.parent_process()
    assert parent is not None
    # A main process that was killed cannot stop its workers, and a task may be long.
    threading.Thread(target=lambda: (wait([parent.sentinel]), os._exit(1)), daemon=True).start()
    work = None
    while True:
        try:
            task = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            work = work or prepare(given)
            answer: tuple[bool, Any] = True, work(task)
        except Exception as error:  # noqa: BLE001 (whatever it is, it is the main process's to raise)
            error.add_note(f"In a process of its own:\n{''.join(traceback.format_exception(error))}")
            answer = False, error
        pipe.send(answer)
