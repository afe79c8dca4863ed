"""Finds the failure that ends a run of several ranks. All ranks end with the exit code of the rank that failed, and
the message of that rank is printed once.

A rank that fails announces its failure before it closes its connections. The other ranks lose these connections, and
take the announced failure as the cause. The place of the announcement depends on the program that started the ranks:

    fxtune's launcher    A file in the launcher's folder. The launcher prints it, because it also knows if a rank was
                         killed and announced nothing.
    torchrun, srun       The store through which the ranks found each other. The first rank to write there prints its
                         failure; each other host prints a line with the name of that host. A rank that fails before
                         the ranks have met (a mistake in a recipe) connects to the store to announce its failure.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Optional

from fxtune.distributed.ranks import HEARTBEATS, process_rank
from fxtune.errors import LostRankError, Stopped, UserError, first_line

PATIENCE = timedelta(seconds=5)
"""How long a rank waits for the announcement of a rank that it has lost. Rank 0, if it holds the store, waits this
long for the others to read the failure."""


@dataclass(frozen=True)
class Failure:
    """Why a rank ended."""

    rank: int
    message: str
    exit_code: int
    signal: Optional[int] = None
    """The signal that ended the rank, if one did. `message` then says what was saved."""
    lost: bool = False
    """Whether another rank's end was the cause."""
    bug: bool = False
    """Whether the error is a bug and no UserError. The rank prints a traceback."""
    at: float = 0.0
    """time.time() of the announcement."""
    host: str = ""
    first: int = 0
    """`host`: the name of the rank's host. `first`: the first rank on this host."""

    @staticmethod
    def of(error: BaseException) -> Failure:
        rank, now = process_rank().rank, time.time()
        if isinstance(error, Stopped):
            return Failure(rank, error.outcome, error.exit_code, signal=int(error.signal), at=now)
        if isinstance(error, UserError):
            return Failure(rank, str(error), error.exit_code, lost=isinstance(error, LostRankError), at=now)
        from fxtune.system.process.oom import process_out_of_memory

        if shortage := process_out_of_memory(error):
            return Failure(rank, str(shortage), shortage.exit_code, at=now)
        return Failure(rank, first_line(error), 1, bug=True, at=now)


_STORES: list[Any] = []
"""The torch.distributed.Store of each run of this process. The last is the current run's. A sweep has several runs."""
_ENDING: list[Failure] = []
"""The failure that ends this run, as soon as this process knows it."""
_LEFT: list[bool] = []
"""Not empty from the end of a sweep's run until the ranks meet for the next one."""


def find_store(limit: timedelta, opens: bool = True) -> Any:
    """Connect to the store at MASTER_ADDR and MASTER_PORT within `limit`, without waiting for other ranks. Rank 0
    opens the store, unless torchrun has opened it or `opens` is false. Raises RuntimeError or ValueError."""
    from torch.distributed import TCPStore

    rank, size, _ = process_rank()
    opens = opens and rank == 0 and not _agent_holds_store()
    address, port = os.environ.get("MASTER_ADDR", "localhost"), int(os.environ.get("MASTER_PORT", ""))
    answer: SimpleQueue[Any] = SimpleQueue()

    def connect() -> None:
        try:
            answer.put(TCPStore(address, port, size, opens, limit, wait_for_workers=False, multi_tenant=opens))
        except (RuntimeError, ValueError) as error:
            answer.put(error)

    # A thread connects: if another program listens at the address, torch waits for its answer without a limit.
    threading.Thread(target=connect, name="fxtune-store", daemon=True).start()
    try:
        store = answer.get(timeout=limit.total_seconds() + 1)
    except Empty:
        keep_connections()
        raise RuntimeError(f"the program that listens there does not answer as a rank would within {limit}") from None
    if isinstance(store, Exception):
        raise store
    return store


def begin_run(store: Any) -> Any:
    """Return a part of `store` for the run that begins. All ranks share this part, and announce failures in it."""
    from torch.distributed import PrefixStore

    _STORES.append(PrefixStore(f"run {len(_STORES)}", store))
    _ENDING.clear()
    _LEFT.clear()
    return _STORES[-1]


def leave_run() -> None:
    """Forget the failure of a run of a sweep that is over. A later error is another failure, even if the ranks do not
    meet again."""
    _ENDING.clear()
    _LEFT[:] = [True]


def runs() -> int:
    """How many runs of this process have begun."""
    return len(_STORES)


_KEPT: list[bool] = []
"""Not empty after keep_connections()."""


def keep_connections() -> None:
    """Note that this process must end by os._exit(), because a normal exit would abort. Either its run failed and it
    kept its process group, or a thread still waits inside torch for a connection."""
    _KEPT.append(True)


def keeps_connections() -> bool:
    """Whether keep_connections() was called."""
    return bool(_KEPT)


def announced(store: Any) -> bool:
    """Whether a rank has announced its failure in `store`, a part that begin_run() returned."""
    return bool(store.check(["failure"]))


def announce(error: BaseException) -> Failure:
    """Announce that `error` ends this rank, and return the failure that ends the run: this rank's, or an earlier
    failure of another rank."""
    if _ENDING:
        return _ENDING[0]
    rank, _, local_rank = process_rank()
    mine = replace(Failure.of(error), host=socket.gethostname(), first=rank - local_rank)
    if folder := os.environ.get(HEARTBEATS):
        with suppress(OSError):  # the launcher is dead
            (Path(folder) / f"failure-{mine.rank}").write_text(json.dumps(asdict(mine)))
        ending = mine
    else:
        ending = _first(mine) or mine
    _ENDING.append(ending)
    return ending


def conclude(error: BaseException) -> tuple[bool, int]:
    """Return whether this rank prints `error`, and the exit code with which it ends."""
    rank, size, local_rank = process_rank()
    mine = Failure.of(error)
    if size == 1:
        return True, mine.exit_code
    ending = announce(error)
    if HEARTBEATS in os.environ:
        return False, ending.exit_code
    if not _wait_for_readers(rank, size) and (mine.lost or (mine.signal and _STORES)):
        # The process with the store is gone. It was rank 0, which has printed if it could, or torchrun, whose end
        # stops all ranks.
        return local_rank == 0 or (mine.lost and rank == 1), mine.exit_code
    if local_rank == 0 and ending.first != rank:
        print(
            f"fxtune: rank {ending.rank} on {ending.host} ended the run; the reason is in its output", file=sys.stderr
        )
    return ending.rank == rank, ending.exit_code


def read(folder: Path) -> list[Failure]:
    """The failures that the ranks of fxtune's launcher announced in `folder`, in the order of time."""
    failures = []
    for path in folder.glob("failure-*"):
        try:
            failures.append(Failure(**json.loads(path.read_text())))
        except ValueError:  # the rank was killed while it wrote this file
            continue
    return sorted(failures, key=lambda failure: failure.at)


def _first(mine: Failure) -> Failure | None:
    """The first failure in the store. If the store has none, `mine` becomes the first. None without a store."""
    try:
        store = _STORES[-1] if _STORES and not _LEFT else begin_run(find_store(PATIENCE))
        if mine.lost:
            try:
                store.wait(["failure"], PATIENCE)
            except RuntimeError as error:
                if "timeout" not in str(error).lower():
                    raise
        return Failure(**json.loads(store.compare_set("failure", "", json.dumps(asdict(mine)))))
    except (RuntimeError, ValueError, KeyError):  # there is no store, or its process is gone
        return None


def _wait_for_readers(rank: int, size: int) -> bool:
    """Count this rank as a reader of the failure. If this rank holds the store, wait until the others have read it.
    Returns whether the store can be reached."""
    try:
        store = _STORES[-1]
        readers = store.add("known", 1)
        until = time.monotonic() + PATIENCE.total_seconds()
        while rank == 0 and not _agent_holds_store() and readers < size and time.monotonic() < until:
            time.sleep(0.05)
            readers = store.add("known", 0)
        return True
    except (RuntimeError, IndexError):
        return False


def _agent_holds_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
