"""The learning-rate range test: where it stops, what it suggests, and that it is the recipe's own training."""

from __future__ import annotations

import copy
import math

import pytest

from fxtune.errors import ConfigError
from fxtune.optim.config import OptimizerName
from fxtune.tuning.lr_finder import has_diverged, range_test, smooth, suggest

RATES = [1e-5 * 10 ** (step / 10) for step in range(50)]


def curve(noise: float = 0.0) -> list[float]:
    """A loss that falls most between 1e-3 and 1e-2, and rises above 2e-2."""
    fall = [1 / (1 + (rate / 3e-3) ** 2) for rate in RATES]
    return [
        0.2 + 1.8 * one + max(0.0, 20 * (rate - 2e-2)) + noise * math.sin(7.3 * step)
        for step, (one, rate) in enumerate(zip(fall, RATES, strict=True))
    ]


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_suggestion_is_where_the_loss_falls_fastest(noise):
    losses = curve(noise)
    found, reason = suggest(RATES, losses)
    assert 1.5e-3 < found < 9e-3
    assert "falls fastest there" in reason
    lowest = min(range(len(RATES)), key=smooth(losses).__getitem__)
    assert found < RATES[lowest] / 2.9
    assert suggest(RATES, [*losses[:-1], math.nan]) == (found, reason), "what ended the test does not count"


def test_curve_without_a_fall_suggests_nothing():
    assert suggest(RATES, [2.0 + 0.01 * math.sin(step) for step in range(50)])[0] is None
    assert "diverged at once" in suggest(RATES[:6], [2.0] * 5 + [math.nan])[1]
    falling = [2.0 - 0.01 * step for step in range(50)]
    assert "where the test ended" in suggest(RATES, falling)[1]


def test_divergence_is_a_loss_that_is_not_finite_or_far_above_the_first_ones():
    assert has_diverged([2.0, math.nan])
    assert has_diverged([math.inf])
    assert not has_diverged([2.0, 9.0]), "a single batch says nothing"
    assert not has_diverged([2.0, 1.5, 2.5, 1.6, 2.4, 2.5]), "batches differ by that much"
    assert has_diverged([2.0, 2.01, 1.99, 2.0, 2.0, 1.0, 3.0, 3.0, 3.0])


def test_same_recipe_gives_the_same_curve_and_leaves_no_file(narrow, cwd):
    narrow.optimizer.lr, before = "auto", copy.deepcopy(narrow)
    before.optimizer.lr = "auto"
    found = range_test(narrow, steps=20, low=1e-4, high=10.0)
    assert narrow == before
    assert range_test(narrow, steps=20, low=1e-4, high=10.0) == found
    assert [path.name for path in cwd.iterdir() if path.name != "cache"] == []
    assert found.rates[0] == 1e-4
    assert found.rates[1] / found.rates[0] == pytest.approx((10.0 / 1e-4) ** (1 / 19))
    assert found.auto == found.present
    assert found.epochs > 1


def test_it_stops_when_the_loss_diverges(narrow, cwd):
    found = range_test(narrow, steps=20, low=1e-2, high=1e30)
    assert found.diverged
    assert len(found.losses) < 20


def test_what_cannot_be_tested_is_refused(narrow, cwd):
    with pytest.raises(ConfigError, match=r"begins at 1 and ends at 0\.1: --lowest must be below --highest"):
        range_test(narrow, low=1.0, high=0.1)
    narrow.optimizer.name = OptimizerName.adamw_schedulefree
    with pytest.raises(ConfigError, match=r"Test with optimizer\.name=adamw"):
        range_test(narrow)
