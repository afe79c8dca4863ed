"""What a record of a step says about it, and its way through JSON."""

from __future__ import annotations

import json
import math

import pytest

from fxtune.training.monitors.step_record import StepRecord

GOOD = StepRecord(loss=2.0, grad_norm=1.0, finite=1.0, loss_scale=1.0, spike_limit=3.0, step=7)


@pytest.mark.parametrize(
    ("changes", "spike", "bad", "scale_too_large"),
    [
        ({}, False, False, False),
        ({"loss": 4.0}, True, True, False),
        ({"loss": math.nan, "finite": 0.0}, False, True, False),
        ({"grad_norm": math.inf, "finite": 0.0, "loss_scale": 65536.0}, False, False, True),
        ({"loss": math.inf, "finite": 0.0, "loss_scale": 65536.0}, False, True, False),
    ],
)
def test_a_step_is_a_spike_or_bad_or_only_had_too_large_a_loss_scale(changes, spike, bad, scale_too_large):
    record = StepRecord(**{**vars(GOOD), **changes})
    assert (record.spike, record.bad, record.scale_too_large) == (spike, bad, scale_too_large)


@pytest.mark.parametrize("metrics", [{}, {"router_entropy": 0.5, "margin": math.nan}])
def test_a_record_in_json_is_the_record(metrics):
    record = StepRecord(**{**vars(GOOD), "loss": math.nan, "metrics": metrics})
    again = StepRecord.from_json(json.loads(json.dumps(record.to_json(), allow_nan=False)))
    assert repr(again) == repr(record)
