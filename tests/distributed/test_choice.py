"""What rank 0 chooses before the ranks meet. Real ranks: the sweep in test_failure.py."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from fxtune.distributed import choice
from fxtune.errors import LostRankError, RankError, StorageError


@pytest.fixture
def be(monkeypatch):
    """be(rank) makes this process that one of two ranks, which have one store."""
    store, stores = dist.HashStore(), {0: [], 1: []}
    monkeypatch.setattr(choice.failure, "find_store", lambda limit: store)

    def become(rank: int) -> None:
        monkeypatch.setattr(choice, "place", lambda: (rank, 2, rank))
        monkeypatch.setattr(choice, "_STORES", stores[rank])

    return become


def test_all_ranks_get_what_rank_0_chooses_each_time(be):
    be(0)
    assert [choice.of_rank_0(lambda: "a"), choice.of_rank_0(lambda: "b")] == ["a", "b"]
    be(1)
    assert [choice.of_rank_0(lambda: pytest.fail("rank 0 chooses")) for _ in range(2)] == ["a", "b"]


def test_mistake_of_rank_0_is_its_own_and_the_others_lose_it(be):
    def fail() -> str:
        raise StorageError("no room")

    be(0)
    with pytest.raises(StorageError, match="no room"):
        choice.of_rank_0(fail)
    be(1)
    with pytest.raises(LostRankError):
        choice.of_rank_0(lambda: "c")


def test_one_process_asks_nobody():
    assert choice.of_rank_0(lambda: "mine") == "mine"


def test_rank_0_that_cannot_be_reached_is_an_error(be, monkeypatch):
    def unreachable(limit: object) -> None:
        raise RuntimeError("the client socket has failed to connect")

    monkeypatch.setattr(choice.failure, "find_store", unreachable)
    be(1)
    with pytest.raises(RankError, match=r"Rank 1 of 2 cannot reach rank 0 .*failed to connect"):
        choice.of_rank_0(lambda: "d")
