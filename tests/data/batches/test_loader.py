"""The loader gives the plan's batches, from any step and with any number of workers, and leaves no process."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from fxtune.data.batches import loader
from fxtune.data.batches.batch import MIN_TARGETS
from fxtune.data.batches.build import plan_training
from fxtune.data.batches.loader import Loader, LoaderConfig, StepBatches
from fxtune.data.batches.plan import Plan
from fxtune.data.chat.split import SplitCounts
from fxtune.data.config import DataConfig, SourceConfig
from fxtune.data.formats.registry import FORMATS
from fxtune.system.machine.host import cores

CPU = torch.device("cpu")


class Table:
    """A token table as the plan reads it: memory maps in a folder, pickled as the folder."""

    name = "table"
    fingerprint = "0"
    split, whole, images = SplitCounts(), None, None
    format, is_grouped, noun, labels, prompts, stored = FORMATS["text"], False, "documents", None, None, None

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ids = np.load(folder / "ids.npy", mmap_mode="r")
        self.supervised = np.load(folder / "supervised.npy", mmap_mode="r")
        self.offsets = np.load(folder / "offsets.npy")
        self.digests = self.held_out_by = np.arange(len(self), dtype=np.uint64)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def by_group(self):
        return self

    by_row = by_group

    def __reduce__(self):
        return Table, (self.folder,)


class Deadly(Table):
    """Kills a worker that builds a batch from it."""

    def __reduce__(self):
        return Deadly, (self.folder,)

    @property
    def ids(self):
        if multiprocessing.parent_process() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return self._ids

    @ids.setter
    def ids(self, value) -> None:
        self._ids = value


@pytest.fixture
def folder(tmp_path) -> Path:
    draw = np.random.default_rng(0)
    length = draw.integers(5, 60, 200)
    np.save(tmp_path / "offsets.npy", np.concatenate([[0], np.cumsum(length)]))
    np.save(tmp_path / "ids.npy", draw.integers(1, 1000, length.sum()).astype(np.int32))
    np.save(tmp_path / "supervised.npy", draw.random(length.sum()) < 0.5)
    return tmp_path


def plan(table: Table, **data) -> Plan:
    config = DataConfig(sources=[SourceConfig(path="table")], sequence_length=64, **data)
    return plan_training([table], config, micro_batch_size=2, global_batch_size=8, max_steps=7, seed=1)


def taken(steps) -> list[tuple[int, list[torch.Tensor]]]:
    return [
        (step.index, [torch.stack([b.input_ids, b.targets, b.position_ids]) for b in step.micro_batches])
        for step in steps
    ]


def check_equal(found, direct: Plan, start: int = 0) -> None:
    assert [index for index, _ in found] == list(range(start, direct.steps))
    for index, batches in found:
        assert len(batches) == direct.micro_batches(index)
        for micro, batch in enumerate(batches):
            expected = direct.batch(index, micro)
            assert (batch == torch.stack([expected.input_ids, expected.targets, expected.position_ids])).all()


def load(made: Plan, config: LoaderConfig, device: torch.device, start_step: int = 0) -> Iterator[StepBatches]:
    """One pass; its workers end with it."""
    loaded = Loader(made, config, device)
    try:
        yield from loaded.steps(start_step)
    finally:
        loaded.close()


def children() -> set[int]:
    """The processes that this process's fork server started (its resource tracker stays)."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_bytes().decode(errors="replace").replace("\0", " ")
            parent = (entry.parent / "stat").read_text().rsplit(")", 1)[1].split()[1]
        except OSError:
            continue
        if "forkserver" in line and "main(" in line:
            found.add((int(entry.parent.name), int(parent)))
    servers = {pid for pid, parent in found if parent == os.getpid()}
    return {pid for pid, parent in found if parent in servers}


def gone(seconds: float = 600.0) -> bool:
    deadline = time.monotonic() + seconds
    while children() and time.monotonic() < deadline:
        time.sleep(0.05)
    return not children()


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("start", [0, 4])
def test_loader_gives_the_plans_batches_from_any_step(folder, packing, start):
    made = plan(Table(folder), packing=packing)
    check_equal(taken(load(made, LoaderConfig(), CPU, start_step=start)), made, start)


def test_workers_give_the_same_batches_and_end_with_the_iterator(folder):
    made = plan(Table(folder))
    config = LoaderConfig(num_workers=2, prefetch_factor=2)
    check_equal(taken(load(made, config, CPU, start_step=2)), made, 2)
    assert gone()
    steps = load(made, config, CPU)
    step = next(steps)
    next(step.micro_batches)
    assert len(children()) == 2
    del steps, step
    assert gone()


def test_second_pass_uses_the_same_workers(folder):
    made = plan(Table(folder), packing=False)
    loaded = Loader(made, LoaderConfig(num_workers=1, prefetch_factor=2), CPU)
    check_equal(taken(loaded.steps()), made)
    workers = children()
    assert len(workers) == 1
    for step in loaded.steps(3):  # stopped in the middle
        next(step.micro_batches)
        break
    check_equal(taken(loaded.steps(5)), made, 5)
    assert children() == workers
    loaded.close()
    assert gone()


def test_workers_end_with_the_loader_even_if_a_pass_is_referenced(folder):
    """The traceback of a signal that arrives while the loop waits for a batch refers to the pass until the interpreter ends."""
    gc.collect()  # passes of the tests before
    steps = load(plan(Table(folder)), LoaderConfig(num_workers=2), CPU)
    next(next(steps).micro_batches)
    held = [one for one in gc.get_objects() if isinstance(one, _MultiProcessingDataLoaderIter)]
    assert len(held) == 1
    assert len(children()) == 2
    steps.close()
    assert gone()


def test_batches_not_taken_are_skipped(folder):
    made = plan(Table(folder))
    for step in load(made, LoaderConfig(), CPU):
        first = next(step.micro_batches)
        assert (first.input_ids == made.batch(step.index, 0).input_ids).all()


def test_only_gpu_batches_have_rounded_targets(folder):
    made = plan(Table(folder))
    pieces = made.batch_spec(0, 0)
    at_once = {
        device: Loader(made, LoaderConfig(num_workers=0), torch.device(device))._loader.dataset[pieces]
        for device in ("cpu", "cuda")
    }
    assert len(at_once["cpu"].labels) == made.batch(0, 0).supervised
    assert len(at_once["cuda"].labels) == MIN_TARGETS


@pytest.mark.parametrize("workers", [0, 1])
def test_loading_does_not_advance_the_random_generator(folder, workers):
    """Dropout is seeded by the step; a random number drawn when a run resumes would change it."""
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    taken(load(plan(Table(folder)), LoaderConfig(num_workers=workers), CPU))
    assert (torch.rand(3) == expected).all()


def test_wait_for_data_is_measured_without_the_time_of_computing(folder, monkeypatch):
    clock = SimpleNamespace(now=0.0)

    class Slow(Table):
        """Takes a second to read a document."""

        @property
        def ids(self):
            clock.now += 1
            return self._ids

        @ids.setter
        def ids(self, value) -> None:
            self._ids = value

    made = plan(Slow(folder), packing=False)
    monkeypatch.setattr(loader, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    steps = load(made, LoaderConfig(), CPU)
    step = next(steps)
    assert step.wait_seconds == 0
    next(step.micro_batches)
    clock.now += 100  # computing
    next(step.micro_batches)
    assert step.wait_seconds == 4  # two micro-batches of two documents


def test_dead_worker_is_replaced_and_no_batch_is_lost(folder, capsys):
    made = plan(Table(folder))
    found = []
    for step in load(made, LoaderConfig(num_workers=2, prefetch_factor=1), CPU):
        if step.index == 3:
            for pid in children():
                os.kill(pid, signal.SIGKILL)
        found += taken([step])
    check_equal(found, made)
    said = capsys.readouterr().out
    assert said.count("A process that builds batches died before step ") == 1
    assert "It is started again, and the run goes on. " in said
    assert gone()


@pytest.mark.slow
def test_after_repeated_deaths_the_main_process_builds_batches(folder, capsys, monkeypatch):
    monkeypatch.setattr(loader, "MAX_WORKER_DEATHS", 2)
    made = plan(Deadly(folder))
    check_equal(taken(load(made, LoaderConfig(num_workers=1), CPU)), made)
    said = capsys.readouterr().out
    assert said.count("died before step 0") == 2
    assert said.count("From here on this process builds them itself.") == 1
    assert "loader.num_workers=0" in said
    assert gone()


@pytest.mark.slow
def test_workers_come_from_the_fork_server_that_was_started_before_the_loader(folder):
    program = (
        "import sys; from pathlib import Path; import test_loader as t; from fxtune.data.batches import loader\n"
        "config = t.LoaderConfig(num_workers=1); loader.start_fork_server(config, t.CPU)\n"
        "children = lambda: {int(x) for x in Path('/proc/self/task', str(t.os.getpid()), 'children').read_text().split()}\n"
        "early = children()\n"
        "steps = t.load(t.plan(t.Table(Path(sys.argv[1]))), config, t.CPU)\n"
        "next(next(steps).micro_batches); print(len(early), early == children())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent
    )
    # The server and Python's resource tracker, and no third process is started for the loader.
    assert done.stdout.split() == ["2", "True"]


@pytest.mark.slow
def test_workers_end_if_the_main_process_is_killed(folder):
    from support.harness import wait_for  # the program below imports this file, and does not find the folder
    from support.processes import alive

    program = (
        "import sys, time; from pathlib import Path; import test_loader as t\n"
        "steps = t.load(t.plan(t.Table(Path(sys.argv[1]))), t.LoaderConfig(num_workers=1), t.CPU)\n"
        "next(next(steps).micro_batches); print(*t.children(), flush=True); time.sleep(6000)"
    )
    main = subprocess.Popen(
        [sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent
    )
    workers = [int(pid) for pid in main.stdout.readline().split()]
    assert workers
    main.kill()
    main.wait()
    try:
        wait_for(lambda: not any(map(alive, workers)))
    finally:
        for worker in filter(alive, workers):
            os.kill(worker, signal.SIGKILL)


def test_plan_and_tables_pickle_as_paths(folder):
    made = plan(Table(folder))
    assert len(pickle.dumps(made)) < 2000
    assert len(pickle.dumps(made.tables)) < 500
    assert len(pickle.dumps(made.batch_spec(0, 0))) < 2000
    again = pickle.loads(pickle.dumps(made))
    assert isinstance(again.tables[0].ids, np.memmap)
    assert (again.batch(6, 3).input_ids == made.batch(6, 3).input_ids).all()


def test_defaults_depend_on_the_device():
    assert LoaderConfig().resolved(CPU) == LoaderConfig(num_workers=0)
    images = LoaderConfig().resolved(torch.device("cuda", 0), with_images=True)
    assert images.num_workers == min(8, cores() - 1)
    cuda = LoaderConfig().resolved(torch.device("cuda", 0))
    assert cuda.num_workers in (0, 1, 2)
    kept = LoaderConfig(num_workers=3)
    assert kept.resolved(torch.device("cuda", 0)) == kept
