"""The private part of Optuna: a trial that a killed process has begun goes on, or is refused."""

from types import SimpleNamespace

import optuna
import pytest

from fxtune.errors import ConfigError
from fxtune.upstream.optuna import trial_of


def test_a_begun_trial_goes_on_with_its_values():
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study()
    begun = study.ask()
    drawn = begun.suggest_float("x", 0, 1)
    (frozen,) = study.get_trials(deepcopy=False)
    again = trial_of(study, frozen)
    assert again.number == begun.number
    assert again.suggest_float("x", 0, 1) == drawn


def test_an_optuna_without_it_is_refused():
    with pytest.raises(ConfigError, match="Start another sweep"):
        trial_of(optuna.create_study(), SimpleNamespace(number=0))
