"""Batches on the device before they are asked for.

The main process knows which documents a micro-batch is made of (a few numbers) and sends that to a worker; the worker
copies the tokens from the memory maps and sends back tensors. A worker holds nothing but open tables, so it starts at any
step. On a GPU a batch is copied by a stream of its own while the one before it is computed, and the number of its supervised
positions is rounded up (Batch.filled), so that steps have few shapes.

Workers are started by a fork server: a process that never had threads, imports torch once and is forked from then on.
Measured here on 2 cores: fork 0.1 s to the first batch, but a fork of a process in which torch or the tokenizer
has started threads can hang; spawn 4.7 s, each time; fork server 2.8 s the first time and 0.1 s from then on. A batch of
4 x 4096 tokens is 0.2 ms of work, so that workers are for tables on slow disks: without a GPU none is started.

A worker that dies (killed for want of memory, a full /dev/shm) costs a run the seconds until that is noticed, not the run: a
batch is a function of the plan, so others begin where it stopped, and after MOST_DEATHS of them the main process builds the
batches itself. Each time that is said.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import TYPE_CHECKING, Any, Optional

import torch
from torch.utils.data import DataLoader, Dataset

from fxtune.data.batches.batch import Batch, BatchSpec, build_batch
from fxtune.errors import ConfigError
from fxtune.system.host import cores
from fxtune.system.signals import leave_signals_to_main_process

if TYPE_CHECKING:
    from fxtune.data.batches.plan import Plan
    from fxtune.data.tokenized.table import TokenTable

MOST_DEATHS = 3
"""Times that workers are started again in a run."""
PATIENCE = 2.0
"""Seconds that workers have to end by themselves; one may be in a read of a slow disk."""


@dataclass
class LoaderConfig:
    num_workers: Optional[int] = field(default=None, metadata={"min": 0})
    """Processes that build batches; null: 0 on a CPU, 2 beside a GPU (a batch is a slice of a memory map, not work)."""
    pin_memory: Optional[bool] = None
    """Page-locked batches, for copies that overlap with compute; null: on beside a GPU."""
    persistent_workers: bool = True
    """Keep the workers of an evaluation for the next one."""
    prefetch_factor: int = field(default=4, metadata={"min": 1})
    """Batches a worker keeps ready."""

    def resolved(self, device: torch.device) -> LoaderConfig:
        """The same with nothing left null. Raises ConfigError for what cannot be done on `device`."""
        cuda = device.type == "cuda"
        if self.num_workers is not None and self.num_workers < 0:
            raise ConfigError(f"loader.num_workers={self.num_workers}: give 0 (no processes) or more, or null.")
        if self.prefetch_factor < 1:
            raise ConfigError(f"loader.prefetch_factor={self.prefetch_factor}: give at least 1.")
        if self.pin_memory and not cuda:
            raise ConfigError(
                "loader.pin_memory=true needs a GPU to copy to, and this run is on the CPU. Set it to null."
            )
        workers = self.num_workers if self.num_workers is not None else min(2, cores() - 1) if cuda else 0
        return replace(self, num_workers=workers, pin_memory=cuda if self.pin_memory is None else self.pin_memory)


@dataclass
class StepBatches:
    """One optimizer step's batches, on the device one at a time."""

    index: int
    micro_batches: Iterator[Batch]
    """In order, to be taken before the next step is asked for (the rest is skipped) and while the steps are held."""
    wait_seconds: float = 0.0
    """Seconds that the taker of `micro_batches` stood still for them so far."""


class Loader:
    """Goes through a plan, as often as wanted, with the same workers (an evaluation does). One pass at a time; close() it, for
    workers end with it and not with a pass.
    """

    def __init__(self, plan: Plan, config: LoaderConfig, device: torch.device) -> None:
        self.plan = plan
        self.config = config.resolved(device)
        self.device = device
        self._order = _Order(plan)
        self._deaths = 0
        self._loader: Optional[DataLoader[Batch]] = self._started(self.config.num_workers or 0)
        self._pass: Optional[Iterator[Batch]] = None

    def steps(self, start_step: int = 0) -> Iterator[StepBatches]:
        """From `start_step` to the end of the plan."""
        assert self._loader is not None, "the loader was closed"
        feed = self._on_device(self._on_host(start_step))
        try:
            for index in range(start_step, self.plan.steps):
                step = StepBatches(index, iter(()))
                step.micro_batches = self._timed(step, feed)
                yield step
                for _ in step.micro_batches:
                    pass
        finally:
            feed.close()

    def close(self) -> None:
        """End the workers, within PATIENCE seconds."""
        self._loader = None
        self._end_pass()

    def _end_pass(self) -> None:
        """End the workers of the last pass that was begun. torch does so when nothing holds the pass any more, but the traceback
        of a signal may until the interpreter ends, which then waits five seconds for each worker beside a GPU (torch 2.11).
        """
        batches, self._pass = self._pass, None
        if (end := getattr(batches, "_shutdown_workers", None)) is None:  # the main process builds the batches
            return
        # In a thread, for torch waits without an end for the one that pins memory, and that one for what a worker sends.
        ending = threading.Thread(target=end, name="fxtune-loader-end", daemon=True)
        ending.start()
        ending.join(PATIENCE)
        if ending.is_alive():
            _kill(getattr(batches, "_workers", ()))  # they hold nothing that anyone would miss

    def _begin_pass(self) -> Iterator[Batch]:
        assert self._loader is not None
        before = multiprocessing.active_children()
        try:
            return iter(self._loader)
        except BaseException:  # a signal while workers are started, which nobody else knows of
            _kill(set(multiprocessing.active_children()).difference(before))
            raise

    def _started(self, workers: int) -> DataLoader[Batch]:
        parallel: dict[str, Any] = dict(
            num_workers=workers,
            multiprocessing_context=_context(),
            worker_init_fn=_start_worker,
            persistent_workers=self.config.persistent_workers,
            prefetch_factor=self.config.prefetch_factor,
        )
        # A generator of its own: DataLoader draws a seed for its workers when it starts, and from torch's global one that
        # would shift the dropout of the first step after a resume.
        return DataLoader(
            _Assembler(self.plan.tables, fill=self.device.type == "cuda"),
            batch_size=None,
            sampler=self._order,
            pin_memory=bool(self.config.pin_memory),
            generator=torch.Generator(),
            **(parallel if workers else {}),
        )

    def _timed(self, step: StepBatches, feed: Iterator[Batch]) -> Iterator[Batch]:
        for _ in range(self.plan.micro_batches(step.index)):
            asked = time.perf_counter()
            batch = next(feed, None)
            assert batch is not None, "another pass was begun"
            step.wait_seconds += time.perf_counter() - asked
            yield batch

    def _on_host(self, step: int) -> Iterator[Batch]:
        micro = 0
        while True:
            assert self._loader is not None
            self._order.step, self._order.micro = step, micro
            batches = None
            try:
                self._pass = batches = self._begin_pass()
                for batch in batches:
                    micro += 1
                    if micro == self.plan.micro_batches(step):
                        step, micro = step + 1, 0
                    yield batch
                return
            except (RuntimeError, OSError, EOFError) as problem:
                self._end_pass()  # what it holds of shared memory may be what there was too little of
                self._go_on_without(problem, step)
            finally:
                if not self.config.persistent_workers and self._pass is batches:
                    self._end_pass()

    def _go_on_without(self, problem: Exception, step: int) -> None:
        """Start again after the death of a worker; raise what else `problem` is."""
        said = str(problem).strip()
        assert self._loader is not None
        # What a worker raised and lived to tell begins with "Caught"; an OSError of our own is a pipe to one that is no more.
        told = (
            said.startswith("Caught ")
            if not isinstance(problem, RuntimeError)
            else not said.startswith(("DataLoader worker", "Pin memory thread"))
        )
        if told or not self._loader.num_workers:
            raise problem
        self._deaths += 1
        mend = self._deaths < MOST_DEATHS
        print(
            f"A process that builds batches died before step {step} ({said.splitlines()[0] if said else 'its pipe broke'}). "
            + (
                "It is started again, and the run goes on. "
                if mend
                else "From here on this process builds them itself. "
            )
            + "Most often the machine ran out of memory, or of shared memory (`df -h /dev/shm`; in a container, --shm-size): "
            "loader.num_workers=0 needs neither.",
            flush=True,
        )
        self._loader = self._started((self.config.num_workers or 0) if mend else 0)

    def _on_device(self, batches: Iterator[Batch]) -> Generator[Batch]:
        """Each batch on the device; on a GPU the next one's copy is under way by then."""
        if self.device.type != "cuda":
            yield from batches
            return
        stream = torch.cuda.Stream(self.device)
        ahead: Optional[tuple[Batch, torch.cuda.Event]] = None
        for batch in batches:
            with torch.cuda.stream(stream):
                copied = batch.to(self.device, non_blocking=True), stream.record_event()
            if ahead is not None:
                yield self._arrived(*ahead)
            ahead = copied
        if ahead is not None:
            yield self._arrived(*ahead)

    def _arrived(self, batch: Batch, copied: torch.cuda.Event) -> Batch:
        """Make the compute stream, not this process, wait for the copy."""
        compute = torch.cuda.current_stream(self.device)
        compute.wait_event(copied)
        batch.record_stream(compute)
        return batch


class _Order:
    """What the workers are to build, in order. Runs in the main process."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.step = self.micro = 0
        """Where to begin."""

    def __iter__(self) -> Iterator[BatchSpec]:
        first = self.micro
        for step in range(self.step, self.plan.steps):
            for micro in range(first, self.plan.micro_batches(step)):
                yield self.plan.batch_spec(step, micro)
            first = 0


class _Assembler(Dataset[Batch]):
    """What a worker is sent: the tables, as the paths that they pickle to. Its keys are micro-batches."""

    def __init__(self, tables: Sequence[TokenTable], fill: bool) -> None:
        self.tables, self.fill = tables, fill

    def __getitem__(self, pieces: BatchSpec) -> Batch:
        batch = build_batch(self.tables, pieces)
        return batch.with_rounded_targets() if self.fill else batch


def _kill(processes: Iterable[BaseProcess]) -> None:
    for process in processes:
        process.kill()


def _context() -> Any:
    """A way to start processes that is safe after threads were started."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def _start_worker(worker: int) -> None:
    """torch gives each worker one thread; Ctrl-C, which reaches all processes, and its like are the main process's to answer."""
    leave_signals_to_main_process()
    sys.excepthook = _unless_broken_off
    main = multiprocessing.parent_process()
    assert main is not None
    # torch's own watch looks for another parent, but a worker's is the fork server, which lives as long as its workers do:
    # of a main process that was killed both would be left, for ever.
    threading.Thread(target=lambda: (wait([main.sentinel]), os._exit(1)), daemon=True).start()


def _unless_broken_off(kind: type[BaseException], error: BaseException, trace: Optional[TracebackType]) -> None:
    """A worker's excepthook: its thread that hands out file descriptors (multiprocessing.resource_sharer) reports by it that
    the main process hung up half-way, which is what one does that is told to end."""
    if not issubclass(kind, (ConnectionError, EOFError)):
        sys.__excepthook__(kind, error, trace)
