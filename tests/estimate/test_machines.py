"""The cards that a run can be planned for."""

import pytest

from fxtune.errors import ConfigError
from fxtune.estimate.cards import CARDS, GENERATIONS, peak_flops, rates
from fxtune.estimate.machines import CARD_MODELS, machine
from fxtune.system.terminal.units import GIB


@pytest.mark.parametrize("name", CARD_MODELS)
def test_every_card_has_a_peak_and_rates_below_it(name):
    found = machine(name, 64)
    assert found.device == "cuda"
    peak = peak_flops(found.device_name, "bfloat16")
    assert peak is not None
    assert 0.4 * peak < rates(found).matmul < peak
    assert any(rates(found) is card.rates for card in CARDS) or rates(found) in GENERATIONS.values()


def test_memory_is_what_the_card_has_or_what_the_run_may_use():
    assert machine("h200", 64).free_memory == pytest.approx(139.2 * GIB, rel=0.01)
    assert machine("H200", 64, free_gib=30).free_memory == 30 * GIB
    assert machine("H200", 64).host_memory == 64 * GIB


def test_unknown_card_is_refused_with_a_near_name():
    with pytest.raises(ConfigError, match=r"--gpu H20O: no such card.*H200"):
        machine("H20O", 64)
