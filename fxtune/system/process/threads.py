"""How many CPU threads a run computes with: decided here, at the start of every run, before its first operator.

A sum on a CPU depends on the number of threads. It also depends on whether torch.set_num_threads() was called at all:
the call, with the same number, too, takes from MKL the freedom to use fewer threads than it may (MKL_DYNAMIC), and so
changes the order of its sums. So every run makes the call, a new run as a resumed one.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from fxtune.system.machine.host import cores

VARIABLES = {"OMP_NUM_THREADS", "MKL_NUM_THREADS"}
"""Environment variables by which a user sets the number of CPU threads."""
PROCESSES = "FXTUNE_PROCESSES"
"""The environment variable by which fxtune tells the ranks of a host how many of them share its cores."""


@dataclass
class _Threads:
    """The threads of this process: as `found` before its first run, and as a run has set them last; 0 before."""

    found: int = 0
    set: int = 0


_threads = _Threads()


def set_threads(recorded: int | None = None) -> int:
    """Set the number of CPU threads of this process for one run, and return it.

    OMP_NUM_THREADS or MKL_NUM_THREADS decide, where the user has set them. `recorded`: the number that a resumed run
    was started with; it is taken if this process may use as many cores. Without one: torch's number, at most as many
    as this process's share of the cores.
    """
    current = torch.get_num_threads()
    if current != _threads.set:  # otherwise it is the number of an earlier run in this process
        _threads.found = current
    chosen, processes = _threads.found, int(os.environ.get(PROCESSES, 1))
    if not os.environ.keys() & VARIABLES:
        most = max(1, cores() // processes)
        chosen = recorded if recorded and 0 < recorded <= most else share(chosen, processes)
    torch.set_num_threads(chosen)
    _threads.set = chosen
    return chosen


def share(threads: int, processes: int) -> int:
    """How many of torch's `threads` each of so many processes on this host has: torch does not see the quota of a
    container."""
    return min(threads, max(1, cores() // processes))
