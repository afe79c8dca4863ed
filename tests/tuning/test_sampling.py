"""Which configurations are drawn."""

from __future__ import annotations

import optuna
import pytest

from fxtune.tuning.sampling import Sampler, SpreadSampler, combinations, sampler_for, suggest
from fxtune.tuning.sweep_space import parse

SPACE = parse(
    ["sweep.lr=loguniform(1e-4,1e-2)", "sweep.r=choice(8,16,32)", "sweep.betas=choice([0.9,0.95],[0.9,0.99])"]
)


def draw(kind: Sampler, trials: int, seed: int = 0, restart: bool = False) -> list[dict]:
    """The values of a study; with `restart` each trial has a sampler of a new process."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study, values = optuna.create_study(), []
    for number in range(trials):
        study.sampler = sampler_for(kind, number, 4, SPACE, seed)
        trial = study.ask()
        values.append(suggest(trial, SPACE))
        assert suggest(trial, SPACE) == values[-1], "what is drawn stays"
        study.tell(trial, abs(values[-1]["optimizer.lr"] - 1e-3))
    return values


def test_spread_covers_every_part_of_each_dimension():
    values = draw(Sampler.spread, 8)
    assert len({int(8 * (configuration["optimizer.lr"] / 1e-4 - 1) // 99) for configuration in values}) > 1
    halves = [configuration["optimizer.lr"] < 1e-3 for configuration in values]
    assert halves.count(True) == 4, "evenly in the logarithm"
    assert {configuration["techniques.lora.r"] for configuration in values} == {8, 16, 32}
    assert {configuration["optimizer.betas"] for configuration in values} == {"[0.9,0.95]", "[0.9,0.99]"}
    assert draw(Sampler.spread, 8, seed=1) != values


def test_few_combinations_are_all_drawn_before_one_comes_again():
    space = parse(["sweep.r=choice(8,16,32)", "sweep.lora.alpha=8,16,32,64"])
    assert combinations(space) == 12
    sampler = SpreadSampler(space, 0)
    assert len({tuple(sampler.point(number).values()) for number in range(12)}) == 12


@pytest.mark.parametrize("kind", Sampler)
def test_draws_depend_on_number_seed_and_results_alone(kind):
    assert draw(kind, 7) == draw(kind, 7)
    values = [tuple(configuration.values()) for configuration in draw(kind, 7)]
    assert len(set(values)) == 7, "a sampler that is made anew does not repeat itself"
