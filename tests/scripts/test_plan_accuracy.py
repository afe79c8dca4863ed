"""The forecasts of `fxtune plan` compared with measurements on an H200."""

import statistics
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts" / "study"))

import plan_accuracy


@pytest.mark.slow
def test_forecasts_are_near_what_was_measured():
    rows = list(plan_accuracy.rows())
    memory = [abs(row.memory_error) for row in rows if row.memory_error is not None]
    times = {row.case: abs(row.time_error) for row in rows if row.time_error is not None}
    assert len(memory) >= 24
    assert statistics.median(memory) <= 0.06
    assert max(times.values()) <= 0.12, times
    assert [row.case for row in rows if not row.right] == []
