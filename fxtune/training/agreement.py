"""Makes all ranks react to an event on one rank: an error, memory that ran out, or a signal."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, cast

from fxtune.distributed.world import World, lost_connection
from fxtune.errors import HardwareError, LostRankError, MemoryShortError, RankError, Stopped, UserError, first_line
from fxtune.system.process.oom import MemoryExhausted, catch_out_of_memory
from fxtune.system.process.signals import SIGNALS

Result = TypeVar("Result")

OUT_OF_MEMORY = 1000
"""A rank's code for running out of memory. It is above every signal number, because the greatest code of all ranks
decides: the step is repeated, and a signal is handled after that."""
FAILED = 2000
"""A rank's code for an error. It is above all others: the run ends with this error."""


@dataclass(frozen=True)
class _Failed:
    error: Exception


def interruptible(world: World) -> AbstractContextManager[None]:
    """A context in which a signal raises Stopped at once. With several ranks the signal is only recorded, because the
    ranks must agree to stop together."""
    return SIGNALS.interruptible() if world.size == 1 else SIGNALS.held()


def shared(world: World, work: Callable[[], Result], doing: str) -> Result:
    """Call work() on every rank. If one rank fails, all raise its error. No rank returns before the others are done.
    Signals wait until then."""
    if world.size == 1:
        return work()
    with SIGNALS.held():
        result = _attempt(work)
    if world.agree(isinstance(result, _Failed), doing):
        raise _common_error(world, result.error if isinstance(result, _Failed) else None)
    assert not isinstance(result, _Failed)
    return result


def together(
    world: World,
    work: Callable[[], Result],
    start_sums: Callable[[], None] = lambda: None,
    stops: bool = True,
    agree: Callable[[int], int] | None = None,
    doing: str = "deciding together",
) -> Result:
    """Call work() on every rank. work() must not wait for a collective, but may start sums. Afterwards every rank
    calls start_sums() to start the remaining sums, even if work() failed. `agree`: called in place of world.agree().

    If one rank fails, all raise its error. If one runs out of memory, all raise MemoryShortError. If one gets a
    signal, it leaves work() at once and all raise Stopped; with stops=False the signal waits for a later call. With
    one rank, this function only calls work(), and the signal handler raises Stopped.

    Ranks that share rows or weights wait for each other inside work(). So with such ranks a signal waits until work()
    ends, and a rank that fails raises its error without agreeing. The others then raise LostRankError.
    """
    if world.size == 1:
        return work()
    with SIGNALS.held():
        try:
            with SIGNALS.interruptible() if stops and not world.shares else nullcontext():
                result = _attempt(partial(catch_out_of_memory, work))
        except Stopped:  # world.agree() below tells all ranks
            result = None
        if world.shares and isinstance(result, (MemoryExhausted, _Failed)):
            raise _reason_to_leave(world, result)
        start_sums()
    exhausted, failed = isinstance(result, MemoryExhausted), isinstance(result, _Failed)
    mine = FAILED if failed else OUT_OF_MEMORY if exhausted else (stops and SIGNALS.received) or 0
    verdict = agree(mine) if agree else world.agree(mine, doing)
    if verdict == FAILED:
        raise _common_error(world, result.error if isinstance(result, _Failed) else None)
    if verdict == OUT_OF_MEMORY:
        reasons = world.gather(result.reason if isinstance(result, MemoryExhausted) else "")
        rank = next(rank for rank, reason in enumerate(reasons) if reason)
        raise MemoryShortError(f"rank {rank}: {reasons[rank]}")
    if verdict:
        raise Stopped(signal.Signals(verdict))
    assert not isinstance(result, (MemoryExhausted, _Failed))
    return cast(Result, result)


def _attempt(work: Callable[[], Result]) -> Result | _Failed:
    try:
        return work()
    except LostRankError:  # the rank to agree with is gone
        raise
    except Exception as error:  # noqa: BLE001  the caller raises it on all ranks
        return _Failed(error)


def _reason_to_leave(world: World, result: MemoryExhausted | _Failed) -> Exception:
    """The error with which this rank leaves: its own failure while other ranks wait for it, or the loss of another
    rank."""
    if isinstance(result, MemoryExhausted):
        return HardwareError(
            f"Rank {world.rank} ran out of memory: {result.reason}. Others wait for its part of rows or weights, so "
            "nothing can be halved in the middle of a step. Lower train.micro_batch_size or data.sequence_length, or "
            "raise parallel.context or parallel.shard."
        )
    if isinstance(result.error, RuntimeError) and lost_connection(result.error):
        return LostRankError(
            f"Rank {world.rank} of {world.size} lost another rank in a step: {first_line(result.error)}"
        )
    return result.error


def _common_error(world: World, mine: Exception | None) -> Exception:
    """The error of the first rank that failed. A rank raises its own bugs itself, with the traceback."""
    sent = mine if mine is None or isinstance(mine, UserError) else RankError(first_line(mine))
    errors = world.gather(sent, "comparing errors")
    rank = next(rank for rank, error in enumerate(errors) if error is not None)
    if mine is not None and (rank == world.rank or not isinstance(mine, UserError)):
        return mine
    error = errors[rank]
    assert error is not None
    return error if not isinstance(error, RankError) else LostRankError(f"Rank {rank} failed: {error}")
