"""Ranks as threads of this process, each with a gloo group of its own: for tests of single collectives, which take
milliseconds. Runs of several ranks are processes (ranks.py)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

Result = TypeVar("Result")
PATIENCE = timedelta(minutes=5)
_NUMBERS = itertools.count()


def on_ranks(ranks: int, work: Callable[[int, str], Result]) -> list[Result]:
    """work(rank, name of the process group) in a thread for each rank; the results in their order."""
    store, number, groups = dist.HashStore(), next(_NUMBERS), list[dist.ProcessGroup]()

    def one(rank: int) -> Result:
        name = f"threads-{number}-{rank}"
        group = dist.ProcessGroup(store, rank, ranks)
        groups.append(group)  # its connections stay open until the last thread has ended
        backend = dist.ProcessGroupGloo(store, rank, ranks, PATIENCE)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        group._set_group_name(name)
        c10d._register_process_group(name, group)
        try:
            return work(rank, name)
        finally:
            c10d._unregister_process_group(name)

    # All threads share the compiler's stance. A thread restores the stance that it found, which may be another
    # thread's. So the process's own stance is restored here.
    with torch.compiler.set_stance("default"), ThreadPoolExecutor(ranks) as pool:
        return [future.result() for future in [pool.submit(one, rank) for rank in range(ranks)]]
