"""Decides how many CPU threads a run computes with, at the start of the run and before its first operator.

A sum on a CPU depends on the number of threads. It also depends on whether torch.set_num_threads() was called, even
with the same number. After the call MKL may not use fewer threads (MKL_DYNAMIC), and this changes the order of its
sums. So every new or resumed run calls the function.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from fxtune.system.machine.host import cores

VARIABLES = {"OMP_NUM_THREADS", "MKL_NUM_THREADS"}
"""Environment variables by which a user sets the number of CPU threads."""
PROCESSES = "FXTUNE_PROCESSES"
"""The environment variable in which fxtune tells each rank how many ranks share the cores of its host."""


@dataclass
class _Threads:
    """The numbers of threads of this process. `set`: by the last run; 0 before a run. `found`: not set by a run."""

    found: int = 0
    set: int = 0


_threads = _Threads()


def set_threads(recorded: int | None = None) -> int:
    """Set the number of CPU threads of this process for one run, and return it.

    A user's OMP_NUM_THREADS or MKL_NUM_THREADS decides. Otherwise the run takes `recorded`, the number of the run that
    it resumes, if this process may use this number of cores. Otherwise it takes torch's number, at most this process's
    share of the cores.
    """
    current = torch.get_num_threads()
    if current != _threads.set:  # an equal number was set by an earlier run in this process
        _threads.found = current
    chosen, processes = _threads.found, int(os.environ.get(PROCESSES, 1))
    if not os.environ.keys() & VARIABLES:
        most = max(1, cores() // processes)
        chosen = recorded if recorded and 0 < recorded <= most else share(chosen, processes)
    torch.set_num_threads(chosen)
    _threads.set = chosen
    return chosen


def share(threads: int, processes: int) -> int:
    """How many of torch's `threads` each of `processes` on this host gets. torch does not see a container's quota."""
    return min(threads, max(1, cores() // processes))
