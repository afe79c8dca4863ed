"""The cores of this machine are timed for a forecast."""

from __future__ import annotations

import pytest

from fxtune.estimate import cpu_speed


def test_speed_is_that_of_the_product_by_the_clock(monkeypatch):
    """By a clock that moves by `seconds` whenever it is read: each round of the loop reads it once."""
    seconds = 0.08
    now = iter(range(10_000))
    monkeypatch.setattr(cpu_speed.time, "perf_counter", lambda: next(now) * seconds)
    flops = 2 * cpu_speed.ROWS * cpu_speed.WIDTH * cpu_speed.INNER
    assert cpu_speed.cpu_speed(2) == pytest.approx(flops / seconds / (2 * cpu_speed.PRODUCT), rel=0.3)
