"""What rank 0 chooses before the ranks meet. Real ranks: the sweep in test_failure.py."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from fxtune.distributed import choice
from fxtune.errors import LostRankError, RankError, StorageError


@pytest.fixture
def be(monkeypatch):
    """be(rank) makes this process that one of two ranks, which have one store. Rank 1 has read the first choices."""
    store, stores = dist.HashStore(), {0: [], 1: []}
    for key in range(2):
        store.set(f"choices/{choice._read_by(1, str(key))}", "")
    monkeypatch.setattr(choice.failure, "find_store", lambda limit: store)

    def become(rank: int) -> None:
        monkeypatch.setattr(choice, "process_rank", lambda: (rank, 2, rank))
        monkeypatch.setattr(choice, "_STORES", stores[rank])

    return become


def test_all_ranks_get_what_rank_0_chooses_each_time(be):
    be(0)
    assert [choice.of_rank_0(lambda: "a"), choice.of_rank_0(lambda: "b")] == ["a", "b"]
    be(1)
    assert [choice.of_rank_0(lambda: pytest.fail("rank 0 chooses")) for _ in range(2)] == ["a", "b"]


def test_error_of_rank_0_is_a_lost_rank_to_the_others(be):
    def fail() -> str:
        raise StorageError("no room")

    be(0)
    with pytest.raises(StorageError, match="no room"):
        choice.of_rank_0(fail)
    be(1)
    with pytest.raises(LostRankError):
        choice.of_rank_0(lambda: "c")


def test_rank_0_waits_until_the_others_have_read_its_choice(be):
    """Otherwise it may end, and a slow rank would look for its store in vain."""
    be(0)
    for chosen in "ab":
        choice.of_rank_0(lambda chosen=chosen: chosen)
    waiting = threading.Thread(target=lambda: choice.of_rank_0(lambda: "c"))
    waiting.start()
    store = choice._STORES[0]
    while not store.check(["2"]):
        pass
    waiting.join(0.2)
    assert waiting.is_alive()
    store.set(choice._read_by(1, "2"), "")
    waiting.join(600)
    assert not waiting.is_alive()


def test_one_process_chooses_without_a_store():
    assert choice.of_rank_0(lambda: "mine") == "mine"


def test_rank_0_that_cannot_be_reached_is_an_error(be, monkeypatch):
    def unreachable(limit: object) -> None:
        raise RuntimeError("the client socket has failed to connect")

    monkeypatch.setattr(choice.failure, "find_store", unreachable)
    be(1)
    with pytest.raises(RankError, match=r"Rank 1 of 2 cannot reach rank 0 .*failed to connect"):
        choice.of_rank_0(lambda: "d")
