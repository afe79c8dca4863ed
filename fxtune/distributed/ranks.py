"""Which rank this process is. Imports no torch."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import signal
import sys
import zlib
from datetime import timedelta
from typing import NamedTuple

HEARTBEATS = "FXTUNE_HEARTBEATS"
"""The environment variable with the folder of the heartbeats, for the ranks of fxtune's launcher."""
LAUNCHER = "FXTUNE_LAUNCHER"
"""The environment variable with the process id of fxtune's launcher."""
MEETING = "FXTUNE_MEETING_SECONDS"
"""The environment variable with the seconds that ranks wait for the others to start; 600 by default."""
_SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_LOCALID")


class ProcessRank(NamedTuple):
    rank: int
    size: int
    """The number of ranks."""
    local_rank: int
    """The number of this rank on its host, from 0."""


@functools.cache
def process_rank() -> ProcessRank:
    """The rank that a launcher gave this process; (0, 1, 0) without a launcher.

    torchrun and fxtune's launcher set RANK, WORLD_SIZE and LOCAL_RANK, `srun` sets Slurm's variables. This function
    removes these variables from the environment: a process that a rank starts is not a rank.
    """
    if "WORLD_SIZE" not in os.environ and "SLURM_STEP_ID" in os.environ:
        # Slurm's variables of a task that srun started become torch's. Unless MASTER_ADDR and MASTER_PORT are set, the
        # ranks meet at the step's first host, at a port that follows from the ids of job and step.
        rank, step_size, size, local_rank = (os.environ.pop(name, "") for name in _SLURM)
        hosts = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_NODELIST", "")
        step = f"{os.environ.get('SLURM_JOB_ID')}.{os.environ['SLURM_STEP_ID']}"
        os.environ.update(RANK=rank, WORLD_SIZE=step_size or size, LOCAL_RANK=local_rank)
        os.environ.setdefault("MASTER_ADDR", first_host(hosts))
        # Linux itself hands out ports from 32768 on.
        os.environ.setdefault("MASTER_PORT", str(20000 + zlib.crc32(step.encode()) % 12000))
    rank, size, local_rank = (os.environ.pop(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if not size or int(size) < 2:
        return ProcessRank(0, 1, 0)
    return ProcessRank(int(rank), int(size), int(local_rank or 0))


def meeting_time() -> timedelta:
    """How long ranks wait for the others to start."""
    return timedelta(seconds=float(os.environ.get(MEETING, 600)))


def act_alone() -> bool:
    """Return whether this process is rank 0. Rank 0 is a single process from then on, for work without other ranks."""
    rank = process_rank().rank
    process_rank.cache_clear()  # process_rank() has removed the variables, so the next call finds no launcher
    return rank == 0


def end_with_launcher() -> None:
    """Let the kernel send this rank a SIGTERM when the process that started it dies, so that it saves, ends, and frees
    its card and the run folder. Only for ranks of fxtune's launcher and torchrun."""
    launcher = os.environ.get(LAUNCHER)
    if (
        process_rank().size == 1
        or not sys.platform.startswith("linux")
        or not (launcher or "TORCHELASTIC_RUN_ID" in os.environ)
    ):
        return
    ctypes.CDLL(None).prctl(1, int(signal.SIGTERM))  # PR_SET_PDEATHSIG
    if launcher and os.getppid() != int(launcher):  # the launcher died before the line above
        os.kill(os.getpid(), signal.SIGTERM)


def first_host(nodelist: str) -> str:
    """The first host of a Slurm node list: `a-[003-005,9],b` begins with a-003, `a[1-2]-b[4,6]` with a1-b4."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodelist)[0]  # type: ignore[index]  # an empty text matches, too
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first) or "localhost"
