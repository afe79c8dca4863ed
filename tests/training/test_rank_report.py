"""Figures of all ranks in a log line."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch

from fxtune.distributed.world import World
from fxtune.tracking.display import figures as shown
from fxtune.training.rank_report import RankReport, slowest


@dataclass(frozen=True)
class TwoRanks(World):
    """Rank 0 of two. `other`: what rank 1 sends."""

    device: torch.device = field(default_factory=partial(torch.device, "cpu"))
    size: int = 2
    other: list[float] = field(default_factory=list)

    def exchange(self, numbers, doing=""):
        return [numbers, self.other]


def test_figures_are_those_of_the_fullest_and_the_slowest_rank():
    report = RankReport(TwoRanks(other=[15.0, 1e6, 3.0, 1e9, 0.0]))
    assert report.figures() == {}
    assert report.longest_wait() is None
    report.timed(lambda: time.sleep(0.002))
    report.waited += 2.0
    assert report.agree(0) == 15  # the other rank has a signal
    found = report.figures()
    assert report.longest_wait() == 3.0
    assert found["train/memory_gib"] == 1e9
    assert found["train/slowest_rank"] == 1
    assert found["train/slowest_behind"] > 1e6
    assert "slowest_rank" in {column.name for column in shown(found)}


def test_each_exchange_counts_the_steps_since_the_last_one():
    report = RankReport(TwoRanks(other=[0.0, math.nan, 0.0, 0.0, 0.0]))
    report.waited = 5.0
    report.timed(lambda: None)
    report.agree(0)
    assert report.steps == report.waited == report.seconds == 0
    assert "train/slowest_rank" not in report.figures()  # rank 1 has finished no step yet
    report.agree(0)
    assert report.longest_wait() == 0.0


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ((1.0, 1.2), (1, 0.2)),
        ((1.0, 3.0, 2.0), (1, 1.0)),
        ((1.0,), None),
        ((1.0, math.nan), None),
    ],
)
def test_the_slowest_is_compared_with_the_median_of_the_others(seconds, expected):
    assert slowest(seconds) == (expected and pytest.approx(expected))


def test_a_rank_that_is_hardly_slower_is_not_named():
    close = {"train/slowest_rank": 1, "train/slowest_behind": 0.04, "train/ranks": 2.0}
    assert [column.name for column in shown(close)] == ["ranks"]
    assert shown({"train/ranks": 1.0}) == {}
