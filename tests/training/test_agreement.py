"""All ranks have the outcome of the rank that failed. Real ranks: tests/distributed/test_ranks.py."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from fxtune.errors import HardwareError, MemoryShortError, Stopped
from fxtune.system.process.signals import SIGNALS
from fxtune.training.agreement import OUT_OF_MEMORY, together


class Two:
    """A world of two ranks. The other one says `verdict` and `reason`."""

    size, rank = 2, 0

    def __init__(self, verdict: int = 0, reason: str = "", shard: int = 1) -> None:
        self.verdict, self.reason, self.shares = verdict, reason, shard > 1

    def agree(self, mine: int, doing: str = "") -> int:
        return max(mine, self.verdict)

    def gather(self, value: str, doing: str = "") -> list[str]:
        return [value, self.reason]


def run(world: Any, work: Any = lambda: "done") -> Any:
    return together(world, work)


def test_result_is_returned_if_no_rank_failed():
    assert run(Two()) == "done"


def test_memory_that_ran_out_on_one_rank_is_an_error_on_all_with_its_rank():
    with pytest.raises(MemoryShortError, match="rank 1: 3 GiB"):
        run(Two(OUT_OF_MEMORY, "3 GiB"))

    def exhausted() -> None:
        raise MemoryError("of this rank")

    with pytest.raises(MemoryShortError, match="rank 0: "):
        run(Two(), exhausted)


def test_rank_without_memory_ends_a_run_of_divided_weights_without_an_agreement():
    def exhausted() -> None:
        raise MemoryError("of this rank")

    with pytest.raises(HardwareError, match=r"Rank 0 ran out of memory: .* Lower train\.micro_batch_size") as found:
        run(Two(shard=2), exhausted)
    assert not isinstance(found.value, MemoryShortError)


def test_signal_of_another_rank_stops_this_one():
    with pytest.raises(Stopped, match="SIGTERM"):
        run(Two(int(signal.SIGTERM)))


def test_own_signal_ends_the_work_at_once_and_memory_comes_first():
    """Ranks that share weights wait for each other inside the work, so there the signal waits for the end of the work."""
    done, sums = [], []

    def signalled() -> None:
        os.kill(os.getpid(), signal.SIGUSR1)
        done.append(True)

    with SIGNALS, pytest.raises(Stopped, match="SIGUSR1"):
        together(Two(), signalled, lambda: sums.append(True))  # type: ignore[arg-type]
    assert not done
    assert sums, "the others have started theirs"
    with SIGNALS, pytest.raises(MemoryShortError):
        run(Two(OUT_OF_MEMORY, "3 GiB"), signalled)
    with SIGNALS, pytest.raises(Stopped, match="SIGUSR1"):
        run(Two(shard=2), signalled)
    assert done


def test_signal_between_two_averages_waits():
    with SIGNALS:
        assert together(Two(), lambda: os.kill(os.getpid(), signal.SIGUSR1), stops=False) is None  # type: ignore[arg-type, func-returns-value]
        with pytest.raises(Stopped, match="SIGUSR1"):
            run(Two())
