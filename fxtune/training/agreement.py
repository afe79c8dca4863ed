"""Decisions that one rank meets and all must follow: memory that ran out, and a signal."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import TypeVar

from fxtune.distributed.world import World
from fxtune.errors import HardwareError, MemoryShortError, Stopped
from fxtune.system.oom import MemoryExhausted, catch_out_of_memory
from fxtune.system.signals import SIGNALS

Result = TypeVar("Result")

OUT_OF_MEMORY = 1000
"""Above every signal number: a step that ran out of memory is repeated, and the signal is handled after it."""


def together(
    world: World,
    work: Callable[[], Result],
    start_sums: Callable[[], None] = lambda: None,
    stops: bool = True,
    agree: Callable[[int], int] | None = None,
) -> Result:
    """work() on every rank. It must wait for no collective, unless ranks share weights or rows, and it may start those
    that start_sums() starts if it has not: each rank calls start_sums() after work(), also one that ran out of memory.
    `agree` is called in place of world.agree().

    Raises MemoryShortError on all ranks if one of them ran out of memory, and Stopped if one of them was signalled;
    with stops=False a signal waits for a later call. With one rank this is only work(): the signal handler raises
    Stopped by itself.

    Where weights or rows are divided, a rank that runs out of memory leaves the others in the middle of an exchange,
    so nothing can be repeated: it raises HardwareError, and its end ends the others.
    """
    if world.size == 1:
        return work()
    with SIGNALS.held():
        result = catch_out_of_memory(work)
        if isinstance(result, MemoryExhausted) and world.degrees.shard * world.degrees.context > 1:
            raise HardwareError(
                f"Rank {world.rank} ran out of memory: {result.reason}. The other ranks wait for its part of weights "
                "or rows, so the batch cannot be halved as it is without parallel.shard and parallel.context. Lower "
                "train.micro_batch_size or data.sequence_length, or raise one of the two; the same command then goes "
                "on from the last checkpoint."
            )
        start_sums()
    exhausted = isinstance(result, MemoryExhausted)
    verdict = (agree or world.agree)(OUT_OF_MEMORY if exhausted else (stops and SIGNALS.received) or 0)
    if verdict == OUT_OF_MEMORY:
        reasons = world.gather(result.reason if isinstance(result, MemoryExhausted) else "")
        rank = next(rank for rank, reason in enumerate(reasons) if reason)
        raise MemoryShortError(f"rank {rank}: {reasons[rank]}")
    if verdict:
        raise Stopped(signal.Signals(verdict))
    assert not isinstance(result, MemoryExhausted)
    return result
