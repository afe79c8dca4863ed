"""Values that ranks exchange from a background thread. Real ranks: tests/checkpoint/test_sharded.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from fxtune.distributed.background import BackgroundGroup
from fxtune.distributed.world import World
from fxtune.errors import LostRankError, RankError


class Second(BackgroundGroup):
    """Rank 1 of two, without a group: the other rank says `other`."""

    def __init__(self, other: Any) -> None:
        super().__init__()
        self.rank, self.size, self.other = 1, 2, other

    def gather(self, value: Any, doing: str) -> list[Any]:
        return [self.other, value] if hasattr(self, "other") else super().gather(value, doing)


def fail(error: Exception) -> Any:
    raise error


def test_one_process_gathers_its_own_value_and_keeps_its_errors():
    alone = BackgroundGroup()
    assert (alone.main, alone.on_this_host, alone.name) == (True, 1, "")
    assert alone.gather(3, "counting") == [3]
    assert alone.together(lambda: 4, "saving") == [4]
    with alone.waiting("saving"), pytest.raises(OSError, match="disk"):
        alone.together(lambda: fail(OSError("disk")), "saving")


def test_results_of_all_ranks_come_in_their_order():
    assert Second((1, None)).together(lambda: 2, "saving") == [1, 2]


def test_expected_error_of_another_rank_is_raised_here_in_its_words():
    with pytest.raises(OSError, match="disk full"):
        Second((None, (True, "disk full"))).together(lambda: 2, "saving")


def test_bug_of_another_rank_is_named_and_the_own_bug_is_raised():
    with pytest.raises(RankError, match="Rank 0 failed while saving: index 3"):
        Second((None, (False, "index 3"))).together(lambda: 2, "saving")
    with pytest.raises(KeyError, match="mine"):
        Second((None, (True, "disk full"))).together(lambda: fail(KeyError("mine")), "saving")


def test_a_rank_that_ends_while_the_others_connect_is_lost(monkeypatch):
    def end(**_: Any) -> Any:
        raise RuntimeError("Gloo connectFullMesh failed with [pair.cc:553] Connection closed by peer [127.0.0.1]:1234")

    monkeypatch.setattr(dist, "new_group", end)
    monkeypatch.setattr(World, "agree", lambda *_: 0)
    with pytest.raises(LostRankError, match=r"Rank 1 of 2 .* lost another rank while making a group of the ranks"):
        BackgroundGroup(World(torch.device("cpu"), 1, 2))
