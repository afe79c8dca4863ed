"""Which rank this process is, and which rank tells the user of an error. Imports no torch."""

from __future__ import annotations

import functools
import os
from datetime import timedelta
from typing import Any

HEARTBEATS = "FXTUNE_HEARTBEATS"
"""The environment variable by which fxtune's launcher gives its ranks the folder of their heartbeats."""
SAME_ERROR = timedelta(seconds=5)
"""How long a rank that failed waits to hear whether rank 0 failed in the same way."""
_STORES: list[Any] = []
"""The torch.distributed.Store through which the ranks found each other, if they have."""


@functools.cache
def place() -> tuple[int, int, int]:
    """(rank, ranks, rank on this host) that a launcher gave this process; (0, 1, 0) without one.

    They are taken out of the environment: a process that a rank starts is not a rank.
    """
    rank, size, local_rank = (os.environ.pop(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if not size or int(size) < 2:
        return 0, 1, 0
    return int(rank), int(size), int(local_rank or 0)


def act_alone() -> bool:
    """Whether this process is rank 0, which from now on is the only one: it does what several ranks cannot share."""
    rank, _, _ = place()
    place.cache_clear()  # the environment does not say any more that this is a rank
    return rank == 0


def tell_through(store: Any) -> None:
    """Let should_tell() use `store`."""
    _STORES[:] = [store]


def should_tell(message: str, lost_rank: bool = False) -> bool:
    """Whether this rank shows the user `message`, an error that ends the run. Rank 0 shows its own; any other rank
    shows its own unless rank 0 fails with the same words. `lost_rank`: the error is that another rank is gone, which
    fxtune's launcher tells better.
    """
    rank, size, _ = place()
    if size == 1:
        return True
    if lost_rank:
        return HEARTBEATS not in os.environ
    if not _STORES:  # no rank has met another yet: all have the same error
        return rank == 0
    try:
        if rank == 0:
            _STORES[0].set("error", message)
            return True
        _STORES[0].wait(["error"], SAME_ERROR)
        return bool(_STORES[0].get("error").decode() != message)
    except RuntimeError as error:  # no word of rank 0 in time, or rank 0 is gone, with its store, and has told
        return rank == 0 or "timeout" in str(error).lower()
