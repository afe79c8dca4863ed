"""What a run costs."""

from __future__ import annotations

import pytest

from fxtune.config.compose import load
from fxtune.errors import ConfigError
from fxtune.tracking.tracker import CostConfig


@pytest.mark.parametrize(
    ("config", "joules", "cost"),
    [
        (CostConfig(), 3.6e6, None),
        (CostConfig(card_hour=2.0), None, 4.0),
        (CostConfig(kwh=0.25), 7.2e6, 0.5),
        (CostConfig(kwh=0.25), None, None),
        (CostConfig(card_hour=2.0, kwh=0.25), 7.2e6, 4.5),
    ],
)
def test_cost_of_two_card_hours(config, joules, cost):
    assert config.of(7200.0, joules) == cost


def test_keys():
    assert load(["tracking.cost.card_hour=2.5", "tracking.cost.kwh=0.3"]).tracking.cost == CostConfig(2.5, 0.3)
    with pytest.raises(ConfigError, match=r"tracking.cost.kwh=0.0` must be above 0"):
        load(["tracking.cost.kwh=0"])
