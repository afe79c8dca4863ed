"""Starts the ranks of a run on this host through torch's elastic agent, and reports a rank that died or hangs.

Each rank runs the same command, with RANK, WORLD_SIZE and LOCAL_RANK in its environment, as with `torchrun`. The agent
ends all ranks when one fails, and does not restart them. A scheduler or a user gives the same command again, and the
run resumes from the last checkpoint.
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
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from fxtune.distributed import failure, heartbeat
from fxtune.distributed.failure import Failure
from fxtune.distributed.heartbeat import PULSE_SECONDS, SAVING_SECONDS, WRITING, Beat
from fxtune.distributed.parallel import Degrees
from fxtune.distributed.ranks import HEARTBEATS, LAUNCHER
from fxtune.distributed.watch import AGAIN, Watch
from fxtune.errors import ConfigError, HardwareError, RankError, Stopped, UserError
from fxtune.system.process.signals import HANDLED
from fxtune.system.process.threads import PROCESSES


def ranks_here(gpus: str, cpu: bool) -> list[int]:
    """The numbers of ranks that `run.gpus` allows on this host, the largest first. `cpu`: ranks run on the CPU.

    Raises HardwareError if this host has too few GPUs.
    """
    cuda = torch.cuda.is_available() and not cpu
    cards = torch.cuda.device_count() if cuda else 1
    if not cuda and not cpu and gpus not in ("auto", "1"):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible!r})"
        raise HardwareError(
            f"run.gpus={gpus}, but torch sees no GPU here{why}. Use run.gpus=auto; run.device=cpu trains with {gpus} "
            "processes on the CPU."
        )
    if gpus == "auto":
        return list(range(cards, 0, -1))
    ranks = int(gpus)
    if cuda and ranks > cards:
        raise HardwareError(
            f"run.gpus={ranks}, but torch sees {cards} GPUs here. Use run.gpus=auto, or widen CUDA_VISIBLE_DEVICES."
        )
    return [ranks]


def require_equal_parts(degrees: Degrees, micro_batches: int, subject: str = "") -> None:
    """Raise ConfigError if the ranks with different rows do not divide the micro-batches of a step. `subject`: the key
    that gave the number of ranks."""
    if micro_batches % degrees.data_ranks:
        ranks = degrees.ranks
        parts = f"{micro_batches} micro-batch{'es' * (micro_batches != 1)}"
        shared = f" (parallel.context={degrees.context} ranks share their rows)" * (degrees.context > 1)
        cut = f", or parallel.context={ranks}, which gives each rank a part of each row" * (degrees.context == 1)
        raise ConfigError(
            f"A step has {parts} (train.global_batch_size / train.micro_batch_size), and "
            f"{f'{subject} needs' if subject else f'{ranks} ranks need'} a number that {degrees.data_ranks} divides"
            f"{shared}. Change one of the three numbers, or use run.gpus=auto{cut}."
        )


def launch(ranks: int, argv: list[str]) -> int:
    """Run `fxtune argv` in `ranks` processes on this host and return the exit code of the run.

    Raises the UserError or Stopped that ended a rank, or RankError for a rank that was killed or stalled. A
    code above 0 is returned only if a rank has printed the reason, such as a traceback.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # its log is for its developers
    with tempfile.TemporaryDirectory(prefix="fxtune-ranks-") as name:
        folder = Path(name)
        os.environ.update({HEARTBEATS: name, LAUNCHER: str(os.getpid()), PROCESSES: str(ranks)})
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # NCCL warns of groups that a failed rank leaves open
        # torch 2.11 ignores this variable and waits 30 seconds.
        os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SAVING_SECONDS))
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
            # Ranks have separate sessions, so a terminal signals only the launcher. A signal that nohup has set to be
            # ignored stays ignored.
            signals_to_handle=",".join(
                number.name for number in HANDLED if signal.getsignal(number) != signal.SIG_IGN
            ),
        )
        watch = _LauncherWatch(folder)
        try:
            with watch:
                elastic_launch(config, sys.executable)("-m", "fxtune", *argv)
        except ChildFailedError as error:
            return _conclude(error.failures, failure.read(folder), heartbeat.read(folder), watch.ended)
        except SignalException as stop:  # the agent has sent the signal to the ranks
            raise _first_cause(failure.read(folder), Stopped(signal.Signals(stop.sigval))) from None
        finally:
            del os.environ[HEARTBEATS], os.environ[LAUNCHER], os.environ[PROCESSES]
    return 0


def _first_cause(failures: list[Failure], otherwise: BaseException) -> BaseException:
    """The error of the first of `failures` that is neither a bug nor the result of another rank's end. If there is no
    such failure, `otherwise`."""
    for announced in failures:
        if announced.signal is not None:
            return Stopped(signal.Signals(announced.signal), announced.message)
        if not announced.lost and not announced.bug:
            kinds: list[type[UserError]] = UserError.__subclasses__()
            kind = next((kind for kind in kinds if kind.exit_code == announced.exit_code), UserError)
            return kind(announced.message)
    return otherwise


def _conclude(deaths: dict[int, Any], failures: list[Failure], beats: dict[int, Beat], ended: str) -> int:
    """Return the exit code of a run in which a rank failed, or raise the error to print.

    `deaths`: torch's ProcessFailure of each rank that did not end with 0, `failures`: what ranks announced, `ended`:
    why the launcher ended a rank. When one rank fails torch sends the others a SIGTERM, and later a SIGKILL.
    """
    if ended:
        raise RankError(f"{ended} {AGAIN}")
    silent = {rank: death for rank, death in deaths.items() if rank not in {announced.rank for announced in failures}}
    killed = {
        rank: death for rank, death in silent.items() if death.exitcode not in (-signal.SIGTERM, -signal.SIGABRT)
    }
    first = min((death.timestamp for death in killed.values()), default=float("inf"))
    # torch's timestamps are whole seconds.
    causes = [announced for announced in failures if not announced.lost and announced.at < first + 1]
    if any(announced.signal is None for announced in causes) or not silent:
        causes = [announced for announced in causes if announced.signal is None] or causes
        if causes and causes[0].bug:
            return causes[0].exit_code
        raise _first_cause(causes, RankError(f"The ranks of this run lost each other. {AGAIN}"))
    rank, death = min((killed or silent).items(), key=lambda item: item[1].timestamp)
    if death.exitcode > 0:  # the rank has printed the reason
        return int(death.exitcode)
    name = signal.Signals(-death.exitcode).name
    killer = " Most often the machine ran out of memory (`dmesg` tells)." if name == "SIGKILL" else ""
    raise RankError(
        f"Rank {rank} of this run ({socket.gethostname()}, process {death.pid}) was killed by {name} at "
        f"{beats.get(rank, Beat())}, and the others were ended.{killer} {AGAIN}"
    )


ENDING_SECONDS = 30.0
"""How long ranks may live after a failure if they have nothing to save."""


def _overdue(failures: list[Failure], beats: dict[int, Beat], now: float) -> set[int]:
    """The ranks that should have ended ENDING_SECONDS after a failure: the rank that announced it, and after an error
    all ranks that are not writing files. (Their GPUs may wait for a rank that is gone.) `now`: time.time()."""
    late = [announced for announced in failures if now - announced.at > ENDING_SECONDS]
    failed = {announced.rank for announced in late}
    stuck = {rank for rank, beat in beats.items() if beat.doing not in WRITING}
    return (failed | (stuck if any(announced.signal is None for announced in late) else set())) & beats.keys()


def _is_alive(child: int) -> bool:
    """Whether this process has a child with this process id that has not ended."""
    try:
        return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False


class _LauncherWatch:
    """A thread that watches the ranks of this host, and kills a rank that hangs (watch.py)."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._over, self.ended = folder, threading.Event(), ""
        """`ended`: why the watch ended a rank; empty if it ended none."""
        self._thread = threading.Thread(target=self._watch, name="fxtune-rank-watch", daemon=True)

    def __enter__(self) -> _LauncherWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        watch = Watch()
        while not self._over.wait(PULSE_SECONDS):
            beats = heartbeat.read(self.folder)
            if failures := failure.read(self.folder):  # the run ends, and silence means nothing any more
                for rank in _overdue(failures, beats, time.time()):
                    if _is_alive(beats[rank].process):
                        os.kill(beats[rank].process, signal.SIGKILL)
                continue
            if verdict := watch.look(beats, time.monotonic()):
                rank, self.ended = verdict
                with suppress(ProcessLookupError):
                    os.kill(beats[rank].process, signal.SIGKILL)
                return  # the agent ends the others
