"""Lets rank 0 choose for all ranks before they have a process group, such as the folder of a sweep's next run."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from fxtune.distributed import failure
from fxtune.distributed.ranks import meeting_time, process_rank
from fxtune.errors import LostRankError, RankError, UserError, first_line

_STORES: list[Any] = []
"""The stores of all choices. They are kept here, because rank 0's store closes when its object is freed."""


def of_rank_0(choose: Callable[[], str]) -> str:
    """Call choose() on rank 0, and return its result on all ranks. All ranks call this function in the same order.

    If choose() raises a UserError, rank 0 raises it and the others raise LostRankError. Raises RankError if the ranks
    cannot reach each other. Rank 0 waits until the others have read the choice, because its end closes the store.
    """
    rank, size, _ = process_rank()
    if size == 1:
        return choose()
    from torch.distributed import PrefixStore

    key = str(len(_STORES))
    try:
        _STORES.append(PrefixStore("choices", failure.find_store(meeting_time())))
        answer = json.loads(_STORES[-1].get(key)) if rank else ""
        if rank:
            _STORES[-1].set(_read_by(rank, key), "")
    except (RuntimeError, ValueError) as error:
        raise RankError(
            f"Rank {rank} of {size} cannot reach rank 0 at MASTER_ADDR and MASTER_PORT: {first_line(error)}. Check "
            "the address, and that no firewall is between the hosts."
        ) from error
    if answer is None:
        raise LostRankError("Rank 0 failed before the ranks met.")
    if rank:
        return str(answer)
    try:
        chosen = choose()
    except UserError:
        _STORES[-1].set(key, "null")
        with suppress(RankError):
            _wait_for_readers(key, size)
        raise
    _STORES[-1].set(key, json.dumps(chosen))
    _wait_for_readers(key, size)
    return chosen


def _read_by(rank: int, key: str) -> str:
    return f"{key}, read by {rank}"


def _wait_for_readers(key: str, size: int) -> None:
    try:
        _STORES[-1].wait([_read_by(rank, key) for rank in range(1, size)], meeting_time())
    except RuntimeError as error:
        raise RankError(
            f"Not all {size} ranks have asked rank 0 within {meeting_time()}. See the messages of the others."
        ) from error
