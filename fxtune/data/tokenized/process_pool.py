"""Worker processes that take tasks in order and return the results in the same order.

Each worker has its own pipe to the main process, and the pipe ends with the worker. The workers of a
ProcessPoolExecutor share a queue. If a worker is killed while it writes a large result or holds the queue's lock, the
main process or the other workers wait forever.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Generator, Iterable
from itertools import islice
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

from fxtune.system.process.signals import leave_signals_to_main_process
from fxtune.system.terminal.library_log import LIBRARY_LOG
from fxtune.upstream.tokenizers import panics_as_errors

Task = TypeVar("Task")
Result = TypeVar("Result")

MAX_WAITING = 2
"""At most this many results wait in memory for an earlier result, besides one task for each process."""


class WorkerDied(Exception):
    """A process was killed, or exited, before it returned its result."""


def map_in_order(
    setup: Callable[[Any], Callable[[Task], Result]], argument: Any, tasks: Iterable[Task], processes: int
) -> Generator[Result]:
    """Yield `setup(argument)(task)` for each task, in order. New processes (spawn) compute the results and end with
    the iterator. Each process calls `setup` once. Raises errors of `setup` and tasks; WorkerDied if a process dies."""
    context = multiprocessing.get_context("spawn")
    workers: dict[Any, BaseProcess] = {}
    busy: dict[Any, int] = {}
    results: dict[int, tuple[bool, Any]] = {}
    queue, next_index, sent = enumerate(tasks), 0, 0
    try:
        for _ in range(processes):
            ours, theirs = context.Pipe()
            workers[ours] = context.Process(
                target=_worker_main, args=(theirs, setup, argument, LIBRARY_LOG.file), daemon=True
            )
            workers[ours].start()
            theirs.close()  # the worker alone holds this end, so the pipe ends with it
        while True:
            idle = [pipe for pipe in workers if pipe not in busy]
            room = min(len(idle), next_index + processes + MAX_WAITING - sent)
            for (index, task), pipe in zip(islice(queue, room), idle, strict=False):
                try:
                    pipe.send(task)
                except OSError as problem:
                    raise WorkerDied from problem
                busy[pipe], sent = index, index + 1
            if next_index in results:
                succeeded, result = results.pop(next_index)
                if not succeeded:
                    raise result
                yield result
                next_index += 1
            elif busy:
                ready: list[Any] = wait(list(busy))
                for pipe in ready:
                    try:
                        results[busy.pop(pipe)] = pipe.recv()
                    except (EOFError, OSError) as problem:
                        raise WorkerDied from problem
            else:
                return
    finally:
        for pipe, process in workers.items():
            if process.pid is not None:
                process.kill()  # no work of the process would be lost
                process.join()
            pipe.close()


def _worker_main(pipe: Any, setup: Callable[[Any], Callable[[Any], Any]], argument: Any, log: Path | None) -> None:
    leave_signals_to_main_process()
    LIBRARY_LOG.collect_in_worker(log)
    work = None
    while True:
        try:
            task = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            with panics_as_errors():
                work = work or setup(argument)
                answer: tuple[bool, Any] = True, work(task)
        except Exception as error:  # noqa: BLE001 - the main process raises it
            error.add_note(f"In a worker process:\n{''.join(traceback.format_exception(error))}")
            answer = False, error
        pipe.send(answer)
