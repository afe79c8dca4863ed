"""Delivers batches on the device, ahead of their use.

The main process sends a worker a BatchSpec, which is small. The worker copies the tokens from the memory maps and
sends tensors back. It has no state except open tables, so it can start at any step. On a GPU a separate stream copies
a batch while the previous batch is computed. For a GPU the number of targets is also rounded up
(Batch.with_rounded_targets), so that steps have few shapes.

A fork server starts the workers: a process without threads that imports torch once. A fork of the main process can
hang, because torch and the tokenizer have started threads, and spawn takes seconds. With images it also imports the
processor's modules once; otherwise each worker would import transformers in seconds. A batch of 4 x 4096 tokens takes
0.2 ms, so workers matter only for slow disks and for images, and a CPU run has none.

A worker that dies (out of memory, a full /dev/shm) costs the run seconds: new workers go on at the same batch. After
MAX_WORKER_DEATHS deaths the main process builds the batches itself. Each death prints a line.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import shutil
import sys
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Optional

import torch
from torch.utils.data import DataLoader, Dataset

from fxtune.data.batches.batch import Batch, BatchSpec, build_batch
from fxtune.data.batches.batch_images import image_bytes
from fxtune.data.batches.plan import Plan
from fxtune.data.tokenized.table import TokenTable
from fxtune.errors import DataError
from fxtune.system.machine.host import cores, memory, reuse_freed_memory
from fxtune.system.process.signals import leave_signals_to_main_process
from fxtune.system.terminal.library_log import LIBRARY_LOG
from fxtune.upstream.torch import end_workers, workers

MAX_WORKER_DEATHS = 3
"""After this many deaths of workers in a run, no worker is started again."""
MEMORY_SHARE = 0.25
"""Share of the free memory, at the start of the loader, for images of prefetched batches."""
SHARED_SHARE = 0.5
"""Share of the free space in SHARED_MEMORY for images of prefetched batches."""
SHARED_MEMORY = Path("/dev/shm")
"""The folder through which workers pass batches to the main process."""
SHUTDOWN_SECONDS = 2.0
"""Workers that have not ended after this time are killed. They may be reading from a slow disk."""


@dataclass
class LoaderConfig:
    num_workers: Optional[int] = field(default=None, metadata={"min": 0, "max": 1024})
    """Processes that build batches. Null: 0 on a CPU, at most 2 for a GPU, or at most 8 if rows have images to
    decode."""
    prefetch_factor: int = field(default=4, metadata={"min": 1, "max": 1024})
    """Batches that a worker keeps ready. If their images would take more than a quarter of the free memory or half of
    /dev/shm, the loader takes fewer batches, and fewer workers."""

    def resolved(self, device: torch.device, with_images: bool = False) -> LoaderConfig:
        """A copy with the number of workers in place of null."""
        if self.num_workers is not None:
            return self
        most = 8 if with_images else 2
        return replace(self, num_workers=min(most, cores() - 1) if device.type == "cuda" else 0)

    def bounded(self, batch_bytes: int, free: int, shared: int) -> LoaderConfig:
        """A copy with fewer prefetched batches, and if needed fewer workers: all prefetched batches take at most
        MEMORY_SHARE of `free` and SHARED_SHARE of `shared` bytes."""
        if not self.num_workers or not batch_bytes:
            return self
        room = int(min(free * MEMORY_SHARE, shared * SHARED_SHARE)) // batch_bytes
        workers = min(self.num_workers, room)
        return replace(
            self, num_workers=workers, prefetch_factor=min(self.prefetch_factor, max(room // max(workers, 1), 1))
        )


def settle_loader(config: LoaderConfig, plan: Plan, device: torch.device) -> tuple[LoaderConfig, int]:
    """(loader options for a plan on this machine, bytes of images in the largest of three batches)."""
    with_images = any(table.images is not None for table in plan.tables)
    resolved = config.resolved(device, with_images)
    if not with_images or not resolved.num_workers or not plan.steps:
        return resolved, 0
    specs = [plan.batch_spec(step, 0) for step in sorted({0, plan.steps // 2, plan.steps - 1})]
    size = max(image_bytes(plan.tables, spec.source, spec.start, spec.length) for spec in specs)
    free, shared = memory()[1], SHARED_MEMORY
    space = shutil.disk_usage(shared).free if shared.is_dir() else free
    return resolved.bounded(size, free // plan.sizes.ranks, space // plan.sizes.ranks), size


@dataclass
class StepBatches:
    """The micro-batches of one optimizer step, on the device one at a time."""

    index: int
    data_step: int
    """The number of this step in a run that drops no steps (BatchSizes.dropped). It seeds dropout and stochastic
    rounding, so an extended run has the same bits as a run of the full length."""
    micro_batches: Iterator[Batch]
    """The micro-batches in order. The next step skips micro-batches that were not taken. None can be taken after the
    iterator of steps has ended."""
    counted: Optional[int] = None
    """The number of micro-batches, from the first on, that count in sums (Plan.counted_micro_batches); None: all."""
    wait_seconds: float = 0.0
    """How long the consumer of `micro_batches` has waited for them."""


class Loader:
    """Iterates over a plan any number of times, one pass at a time. The workers end with close(), not with a pass."""

    def __init__(self, plan: Plan, config: LoaderConfig, device: torch.device) -> None:
        self.plan = plan
        self.config, _ = settle_loader(config, plan, device)
        self.device = device
        self._with_images = any(table.images is not None for table in plan.tables)
        self._specs = _SpecSampler(plan)
        self._deaths = 0
        self._loader: Optional[DataLoader[Batch | DataError]] = self._make_loader(self.config.num_workers or 0)
        self._pass: Optional[Iterator[Batch | DataError]] = None

    def steps(self, start_step: int = 0) -> Iterator[StepBatches]:
        """The steps from `start_step` to the end of the plan."""
        assert self._loader is not None, "the loader was closed"
        feed = self._on_device(self._on_host(start_step))
        try:
            for index in range(start_step, self.plan.steps):
                data_step = index - self.plan.sizes.dropped
                step = StepBatches(index, data_step, iter(()), self.plan.counted_micro_batches(index))
                step.micro_batches = self._timed(step, feed)
                yield step
                for _ in step.micro_batches:
                    pass
        finally:
            feed.close()

    def close(self) -> None:
        """End the workers, within SHUTDOWN_SECONDS."""
        self._loader = None
        self._end_pass()

    def _end_pass(self) -> None:
        """End the workers of the last pass. torch would end them when nothing refers to the pass. But the traceback of
        a signal may refer to it until the interpreter exits, and torch 2.11 then waits 5 s for each worker."""
        batches, self._pass = self._pass, None
        if (shutdown := end_workers(batches)) is None:  # the main process builds the batches
            return
        # A thread ends them, because torch waits without limit for its thread that pins memory. That thread waits for
        # data from a worker.
        thread = threading.Thread(target=shutdown, name="fxtune-loader-end", daemon=True)
        thread.start()
        thread.join(SHUTDOWN_SECONDS)
        if thread.is_alive():
            _kill(workers(batches))  # workers hold nothing that would be lost

    def _begin_pass(self) -> Iterator[Batch | DataError]:
        assert self._loader is not None
        before = multiprocessing.active_children()
        try:
            return iter(self._loader)
        except BaseException:  # a signal came while workers start, and nothing refers to the new processes yet
            _kill(set(multiprocessing.active_children()).difference(before))
            raise

    def _make_loader(self, workers: int) -> DataLoader[Batch | DataError]:
        parallel: dict[str, Any] = dict(
            num_workers=workers,
            multiprocessing_context=_safe_context(self.plan.tables),
            worker_init_fn=partial(_init_worker, LIBRARY_LOG.file, self._with_images),
            persistent_workers=True,  # the next evaluation uses the same workers
            prefetch_factor=self.config.prefetch_factor,
        )
        # DataLoader draws a seed at each start. It has its own generator, because a draw from the global generator
        # would change the dropout of the first step after a resume.
        return DataLoader(
            _BatchDataset(self.plan.tables, round_targets=self.device.type == "cuda"),
            batch_size=None,
            sampler=self._specs,
            pin_memory=self.device.type == "cuda",  # copies overlap with compute
            generator=torch.Generator(),
            **(parallel if workers else {}),
        )

    def _timed(self, step: StepBatches, feed: Iterator[Batch]) -> Iterator[Batch]:
        for _ in range(self.plan.micro_batches(step.index)):
            started = time.perf_counter()
            batch = next(feed, None)
            assert batch is not None, "another pass was begun"
            step.wait_seconds += time.perf_counter() - started
            yield batch

    def _on_host(self, step: int) -> Iterator[Batch]:
        micro = 0
        while True:
            self._specs.step, self._specs.micro = step, micro
            try:
                self._pass = self._begin_pass()
                for batch in self._pass:
                    if isinstance(batch, DataError):
                        raise batch
                    micro += 1
                    if micro == self.plan.micro_batches(step):
                        step, micro = step + 1, 0
                    yield batch
                return
            except (RuntimeError, OSError, EOFError) as problem:
                self._end_pass()  # this releases the pass's shared memory, which may have been full
                self._replace_workers(problem, step)

    def _replace_workers(self, problem: Exception, step: int) -> None:
        """Start new workers if `problem` is the death of a worker. Raise any other problem."""
        message = str(problem).strip()
        assert self._loader is not None
        # torch's message begins with "Caught" if a worker raised an error, and with one of the other two texts below
        # if a worker died. An OSError of this process means a broken pipe to a dead worker.
        if isinstance(problem, RuntimeError):
            died = message.startswith(("DataLoader worker", "Pin memory thread"))
        else:
            died = not message.startswith("Caught ")
        if not died or not self._loader.num_workers:
            raise problem
        self._deaths += 1
        restart = self._deaths < MAX_WORKER_DEATHS
        consequence = (
            "It is started again, and the run goes on." if restart else "From here on this process builds them itself."
        )
        print(
            f"A process that builds batches died before step {step} "
            f"({message.splitlines()[0] if message else 'broken pipe'}). {consequence} Most often memory ran out, or "
            "shared memory (`df -h /dev/shm`; in a container, --shm-size): loader.num_workers=0 needs neither.",
            flush=True,
        )
        self._loader = self._make_loader((self.config.num_workers or 0) if restart else 0)

    def _on_device(self, batches: Iterator[Batch]) -> Generator[Batch]:
        """Yield each batch on the device. On a GPU, the copy of the next batch starts before a batch is yielded."""
        if self.device.type != "cuda":
            yield from batches
            return
        stream = torch.cuda.Stream(self.device)
        ahead: Optional[tuple[Batch, torch.cuda.Event]] = None
        for batch in batches:
            with torch.cuda.stream(stream):
                copied = batch.to(self.device, non_blocking=True), stream.record_event()
            if ahead is not None:
                yield self._copied(*ahead)
            ahead = copied
        if ahead is not None:
            yield self._copied(*ahead)

    def _copied(self, batch: Batch, done: torch.cuda.Event) -> Batch:
        """Make the compute stream, not this process, wait for the copy."""
        compute = torch.cuda.current_stream(self.device)
        compute.wait_event(done)
        batch.record_stream(compute)
        return batch


class _SpecSampler:
    """Runs in the main process and yields the specs of the batches to build, from (`step`, `micro`) on."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.step = self.micro = 0

    def __iter__(self) -> Iterator[BatchSpec]:
        first = self.micro
        for step in range(self.step, self.plan.steps):
            for micro in range(first, self.plan.micro_batches(step)):
                yield self.plan.batch_spec(step, micro)
            first = 0


class _BatchDataset(Dataset[Batch | DataError]):
    """The dataset of a worker: its keys are BatchSpecs, its items Batches. The tables pickle as paths."""

    def __init__(self, tables: Sequence[TokenTable], round_targets: bool) -> None:
        self.tables, self.round_targets = tables, round_targets

    def __getitem__(self, spec: BatchSpec) -> Batch | DataError:
        """Build a batch. An error is returned, because torch would add the worker's traceback to a raised error."""
        try:
            batch = build_batch(self.tables, spec)
        except DataError as error:
            return error
        return batch.with_rounded_targets() if self.round_targets else batch


def _kill(processes: Iterable[BaseProcess]) -> None:
    for process in processes:
        process.kill()


def start_fork_server(config: LoaderConfig, device: torch.device, tables: Sequence[TokenTable] = ()) -> None:
    """Start the fork server of the workers, and do not wait for it. It imports torch and what reads the images of
    `tables`, which takes seconds, while the model is built. Does nothing if `config` asks for no workers on
    `device`."""
    if config.resolved(device).num_workers and _safe_context(tables).get_start_method() == "forkserver":
        multiprocessing.forkserver.ensure_running()


def _safe_context(tables: Sequence[TokenTable]) -> Any:
    """A way to start processes that is safe when threads run."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    processor = next((table.image_processor for table in tables if table.images is not None), None)
    context.set_forkserver_preload([__name__, *(processor.modules if processor else [])])
    return context


def _init_worker(log: Optional[Path], with_images: bool, worker: int) -> None:
    # This call also ends the worker when the main process ends. torch's watchdog would not, because a worker's parent
    # is the fork server.
    leave_signals_to_main_process()
    LIBRARY_LOG.collect_in_worker(log)
    if with_images:
        reuse_freed_memory()
    sys.excepthook = _ignore_broken_connection


def _ignore_broken_connection(kind: type[BaseException], error: BaseException, trace: Optional[TracebackType]) -> None:
    """The excepthook of a worker. If the main process ends first, resource_sharer fails. This is not reported."""
    if not issubclass(kind, (ConnectionError, EOFError)):
        sys.__excepthook__(kind, error, trace)
