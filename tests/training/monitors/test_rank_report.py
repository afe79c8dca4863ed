"""Figures of all ranks in a log line."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch

from fxtune.distributed.parallel import Degrees
from fxtune.distributed.world import World
from fxtune.tracking.display import figures as shown
from fxtune.training.monitors.rank_report import RankReport, slowest


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
    assert report.waited == 0
    assert report.timer.read() == {}
    assert "train/slowest_rank" not in report.figures()  # rank 1 has finished no step yet
    report.agree(0)
    assert report.longest_wait() == 0.0


def test_steps_that_a_gpu_has_not_finished_are_counted_later(monkeypatch):
    """Nothing waits for the GPU: an exchange takes the steps that are done."""
    done: set[int] = set()

    class Event:
        made = 0

        def __init__(self, enable_timing: bool) -> None:
            self.number = Event.made
            Event.made += 1

        def record(self) -> None: ...

        def query(self) -> bool:
            return self.number in done

        def elapsed_time(self, end: Event) -> float:
            assert end.query()
            return 1000.0 * end.number

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 2**30)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 3 * 2**30)
    report = RankReport(TwoRanks(device=torch.device("cuda", 0), other=[0.0, 1.0, 0.0, 0.5, 0.0]))
    for _ in range(2):
        report.timed(lambda: None)
    report.agree(0)
    assert "train/slowest_rank" not in report.figures()
    done.update(range(2))  # the first step
    report.agree(0)
    assert report.figures() == {
        "train/memory_gib": 1.0,
        "train/memory_reserved_gib": 3.0,
        "train/slowest_rank": 0,
        "train/slowest_behind": 0.0,
        "train/forward_backward_seconds": 1.0,
    }
    done.update(range(4))
    report.agree(0)
    assert report.figures()["train/slowest_behind"] == 2.0


def test_no_rank_is_the_slowest_of_those_that_share_weights_or_rows():
    report = RankReport(TwoRanks(chosen=Degrees(shard=2), other=[0.0, 1.0, 0.0, 0.5, 0.0]))
    report.timed(lambda: time.sleep(0.001))
    report.agree(0)
    found = report.figures()
    assert found["train/forward_backward_seconds"] >= 0.001
    assert "train/slowest_rank" not in found


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
