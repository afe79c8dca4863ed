import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxtune.optim.schedule import Schedule, ScheduleConfig, ScheduleName, learning_rate

configs = st.builds(
    ScheduleConfig,
    name=st.sampled_from(ScheduleName),
    warmup_steps=st.floats(0, 1) | st.integers(0, 20),
    min_lr_ratio=st.floats(0, 1),
    decay_steps=st.floats(0, 1) | st.integers(0, 20),
)


@given(configs, st.integers(1, 300))
def test_rate_stays_within_bounds_and_rises_in_warm_up(config, steps):
    rates = [learning_rate(config, 2.0, step, steps) for step in range(steps)]
    assert all(0 < rate <= 2.0 + 1e-12 or (rate >= 0 and config.min_lr_ratio == 0) for rate in rates)
    warmup = min(math.ceil(config.warmup_steps * (steps if config.warmup_steps < 1 else 1)), steps)
    assert rates[:warmup] == sorted(rates[:warmup])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    assert all(rate >= 2.0 * config.min_lr_ratio - 1e-12 for rate in rates[warmup:])


def test_cosine_follows_its_formula():
    config = ScheduleConfig(warmup_steps=10, min_lr_ratio=0.1)
    assert learning_rate(config, 1.0, 0, 110) == 0.1
    assert learning_rate(config, 1.0, 9, 110) == 1.0
    assert learning_rate(config, 1.0, 10, 110) == 1.0
    assert math.isclose(learning_rate(config, 1.0, 60, 110), 0.1 + 0.9 * 0.5)
    assert math.isclose(learning_rate(config, 1.0, 109, 110), 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 0.99)))


def test_linear_and_constant():
    assert math.isclose(learning_rate(ScheduleConfig(ScheduleName.linear, warmup_steps=0), 1.0, 25, 100), 0.75)
    assert learning_rate(ScheduleConfig(ScheduleName.constant, warmup_steps=0), 1.0, 99, 100) == 1.0


def test_wsd_decays_over_the_last_share():
    config = ScheduleConfig(ScheduleName.wsd, warmup_steps=10, decay_steps=0.2)
    rates = [learning_rate(config, 1.0, step, 100) for step in range(100)]
    assert rates[9:81] == [1.0] * 72
    assert math.isclose(rates[90], 0.5)
    assert math.isclose(rates[99], 0.05)


def test_decay_that_begins_early_has_the_rates_of_a_shorter_run():
    config = ScheduleConfig(ScheduleName.wsd, warmup_steps=5, decay_steps=0.2)
    whole = Schedule.of(config, 1.0, 1000)
    early = whole.decaying(step=100, origin=80, decay=whole.decay_from(80))
    assert (early.last, early.dropped, early.decay) == (120, 20, 20)
    short = Schedule.of(config, 1.0, 100)
    assert [early.rate(step) for step in range(100, 120)] == [short.rate(step) for step in range(80, 100)]
    assert whole.resumed(early.saved()) == early
    assert (
        Schedule.of(ScheduleConfig(ScheduleName.wsd, warmup_steps=60, decay_steps=0.9), 1.0, 100).decay_from(50) == 50
    )
    longer = early.extended(planned=200, step=120, origin=80)
    assert (longer.last, longer.dropped, longer.decay) == (240, 40, 40)
    assert [longer.rate(step) for step in (120, 199, 220)] == [1.0, 1.0, 0.5]


@pytest.mark.parametrize(
    "change", [{"last": -1}, {"last": 2000}, {"decay": 5.0}, {"more": 1}, {"dropped": 999}, {"steps": 1001}]
)
def test_lengths_of_a_strange_state_are_refused(change):
    schedule = Schedule.of(ScheduleConfig(ScheduleName.wsd), 1.0, 1000)
    with pytest.raises(ValueError, match="schedule:"):
        schedule.resumed({**schedule.saved(), **change})
