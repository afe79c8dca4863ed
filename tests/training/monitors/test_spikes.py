"""The window of losses against its definition in numpy, and on typical loss curves."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxtune.config.root import Spikes
from fxtune.training.monitors.spikes import LEAST, MIN_SPREAD, SpikeWindow

CPU = torch.device("cpu")
LOSSES = st.lists(st.floats(0, 1e4, width=32) | st.just(math.nan) | st.just(math.inf), min_size=1, max_size=40)


def limits(window: SpikeWindow, losses: list[float]) -> list[float]:
    return [window.limit(torch.tensor(loss)).item() for loss in losses]


def expected(before: list[float], size: int, threshold: float) -> float:
    losses_before = np.asarray(before[-size:], np.float32)
    if len(losses_before) < max(1, size // 4):
        return math.inf
    with np.errstate(invalid="ignore"):
        middle = np.sort(losses_before)[(len(losses_before) - 1) // 2]
        spread = np.sort(np.abs(losses_before - middle))[(len(losses_before) - 1) // 2]
        above = np.float32(threshold) * np.maximum(np.float32(1.4826) * spread, np.float32(MIN_SPREAD) * middle)
        limit = float(middle + np.maximum(above, np.float32(LEAST)))
        return limit if math.isfinite(limit) else math.inf


@given(LOSSES, st.integers(1, 12), st.floats(0.5, 20))
@settings(max_examples=150)
def test_limit_is_median_plus_threshold_times_spread(losses, size, threshold):
    found = limits(SpikeWindow(CPU, Spikes.report, size, threshold), losses)
    for at, limit in enumerate(found):
        wanted = expected(losses[:at], size, threshold)
        assert limit == pytest.approx(wanted, rel=1e-5)


@given(LOSSES, st.integers(1, 8), st.data())
@settings(max_examples=100)
def test_window_from_saved_state_gives_the_same_limits(losses, size, data):
    cut = data.draw(st.integers(0, len(losses)))
    undisturbed, first, second = (SpikeWindow(CPU, Spikes.skip, size, 8.0) for _ in range(3))
    limits(first, losses[:cut])
    second.load(json.loads(json.dumps(first.state(), allow_nan=False)))
    finite = [
        [limit > loss for limit, loss in zip(found, losses[cut:], strict=True)]
        for found in (limits(undisturbed, losses)[cut:], limits(second, losses[cut:]))
    ]
    assert finite[0] == finite[1]


def spikes(losses: list[float], **options) -> list[int]:
    window = SpikeWindow(CPU, Spikes.report, options.get("size", 64), options.get("threshold", 8.0))
    return [at for at, (loss, limit) in enumerate(zip(losses, limits(window, losses), strict=True)) if loss > limit]


def test_noise_is_no_spike_and_a_jump_is():
    """A falling curve of a thousand steps with the noise of small batches, then with three bad batches."""
    draw = np.random.default_rng(0)
    losses = 1 + 2 * np.exp(-np.arange(1000) / 200) + draw.normal(0, 0.15, 1000)
    assert spikes(losses.tolist()) == []
    for at in (40, 500, 501):
        losses[at] += 3
    assert spikes(losses.tolist()) == [40, 500, 501]


def test_lasting_change_is_no_spike_after_half_a_window():
    found = spikes([1.0 + 0.01 * (at % 7) for at in range(200)] + [5.0 + 0.01 * (at % 7) for at in range(200)])
    assert found
    assert found[0] == 200
    assert found[-1] <= 200 + 64 // 2


def test_spread_has_a_minimum():
    assert spikes([2.0] * 100 + [2.1] + [2.0] * 100) == []
    assert spikes([2.0] * 100 + [2.2] + [2.0] * 100) == [100]


def test_nothing_is_a_spike_when_off():
    window = SpikeWindow(CPU, Spikes.off, 4, 8.0)
    assert limits(window, [1.0] * 20 + [1e9]) == [math.inf] * 21
    assert window.state() == {}


def test_losses_of_rows_learned_by_heart_are_no_spikes():
    random = np.random.default_rng(0)
    found = limits(
        SpikeWindow(CPU, Spikes.report, 64, 8.0), [0.004 + 0.0001 * x for x in random.normal(size=64)] + [1]
    )
    assert 0.03 < found[-1] < 0.1
