"""Starts the ranks of a run on this host through torch's elastic agent, and reports the one that died or hangs.

Each rank is the same command again, with RANK, WORLD_SIZE and LOCAL_RANK in its environment. `torchrun` starts ranks
in the same way, so a run does not know who started it. The agent ends all ranks when one fails. It is told not to
restart them: the same command resumes from the last checkpoint, and a scheduler or a user gives it.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import torch

from fxtune.distributed import heartbeat
from fxtune.distributed.heartbeat import Beat
from fxtune.distributed.parallel import ParallelConfig, decide
from fxtune.distributed.ranks import HEARTBEATS, place
from fxtune.errors import ConfigError, HardwareError, RankError, Stopped

STALL_SECONDS = 45.0
"""A rank that does not move while the others wait for it is named after this time."""
GRACE_SECONDS = 600
"""How long ranks may take to save after a signal before they are killed."""


def ranks_to_start(gpus: str, cpu: bool, micro_batches: int, parallel: ParallelConfig | None = None) -> int:
    """How many ranks `run.gpus` means here for steps of `micro_batches` micro-batches; 1 in a process that is a rank.

    `cpu`: the ranks are to be processes on the CPU. `parallel`: how they will be divided. Raises ConfigError and
    HardwareError.
    """
    parallel = parallel or ParallelConfig()
    if place()[1] > 1:
        return 1
    cuda = torch.cuda.is_available() and not cpu
    cards = torch.cuda.device_count() if cuda else 1
    if gpus == "auto":
        fitting = [ranks for ranks in range(1, cards + 1) if _divides(parallel, ranks, micro_batches)]
        return max(fitting, default=cards)  # if none fits, the ranks say why
    ranks = int(gpus)
    if cuda and ranks > cards:
        raise HardwareError(
            f"run.gpus={ranks}, but torch sees {cards} GPUs here. Use run.gpus=auto, or widen CUDA_VISIBLE_DEVICES."
        )
    degrees = decide(parallel, ranks)
    if micro_batches % degrees.data_ranks:
        parts = f"{micro_batches} micro-batch{'es' * (micro_batches != 1)}"
        shared = f" (parallel.context={degrees.context} of them share their rows)" * (degrees.context > 1)
        raise ConfigError(
            f"run.gpus={ranks}{shared} does not divide a step into equal parts: it has {parts} "
            "(train.global_batch_size / train.micro_batch_size). Change one of the three, or use run.gpus=auto."
        )
    return ranks


def _divides(parallel: ParallelConfig, ranks: int, micro_batches: int) -> bool:
    try:
        return micro_batches % decide(parallel, ranks).data_ranks == 0
    except ConfigError:
        return False


def launch(ranks: int, argv: list[str]) -> int:
    """Run `fxtune argv` in `ranks` processes on this host and return the exit code of the run.

    Raises RankError if a rank died without a message of its own.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # its lines are for its developers
    with tempfile.TemporaryDirectory(prefix="fxtune-ranks-") as folder:
        beats = Path(folder)
        os.environ[HEARTBEATS] = folder
        # torch 2.11 ignores this and waits 30 seconds.
        os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(GRACE_SECONDS))
        # Each rank would otherwise take every core.
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",  # a free port
            local_addr="localhost",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
            signals_to_handle="SIGTERM,SIGINT,SIGUSR1",
        )
        watch = _StallWatch(beats)
        try:
            with watch:
                elastic_launch(config, sys.executable)("-m", "fxtune", *argv)
        except ChildFailedError as error:
            return _exit_code(error.failures, heartbeat.read(beats))
        except SignalException as stop:  # the agent has passed it on, and rank 0 has told what was saved
            return Stopped(signal.Signals(stop.sigval)).exit_code
        finally:
            del os.environ[HEARTBEATS]
    return 0


def _exit_code(failures: dict[int, Any], beats: dict[int, Beat]) -> int:
    """The exit code of the rank that failed first; RankError if a signal killed it."""
    consequences = (RankError.exit_code, -signal.SIGTERM, -signal.SIGABRT)
    causes = {rank: one for rank, one in failures.items() if one.exitcode not in consequences}
    rank, first = min((causes or failures).items(), key=lambda item: item[1].timestamp)
    beat = beats.get(rank, Beat())
    if first.exitcode == RankError.exit_code:
        raise RankError(
            f"The ranks of this run lost each other at {beat}. The same command goes on from the last checkpoint."
        )
    if first.exitcode > 0:  # the rank has told why
        return int(first.exitcode)
    name = signal.Signals(-first.exitcode).name
    killer = " Most often the machine ran out of memory (`dmesg` tells)." if name == "SIGKILL" else ""
    raise RankError(
        f"Rank {rank} of this run ({socket.gethostname()}, process {first.pid}) was killed by {name} at "
        f"{beat}, and the others were ended.{killer} The same command goes on from the last "
        "checkpoint."
    )


class _StallWatch:
    """A thread that names a rank which does not move while all others wait for it."""

    def __init__(self, beats: Path) -> None:
        self.beats, self._over, self._named = beats, threading.Event(), 0.0
        self._thread = threading.Thread(target=self._watch, name="fxtune-stall-watch", daemon=True)

    def __enter__(self) -> _StallWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(5.0):
            if (found := stalled(heartbeat.read(self.beats), time.time())) and found[1].since != self._named:
                rank, beat = found
                self._named = beat.since
                print(
                    f"fxtune: all ranks have waited for rank {rank} for {time.time() - beat.since:.0f} s: it is at "
                    f"{beat}.",
                    file=sys.stderr,
                    flush=True,
                )


def stalled(beats: dict[int, Beat], now: float) -> tuple[int, Beat] | None:
    """The rank that all others wait for, if it has said nothing for STALL_SECONDS."""
    busy = [(rank, beat) for rank, beat in beats.items() if not beat.waits]
    if len(busy) == 1 and len(beats) > 1 and now - max(beat.since for beat in beats.values()) > STALL_SECONDS:
        return busy[0]
    return None
