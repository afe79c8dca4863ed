"""Private parts of Optuna."""

from __future__ import annotations

from typing import Any

import optuna

from fxtune.errors import ConfigError


def trial_of(study: Any, frozen: Any) -> Any:
    """The trial that a study has stored as `frozen`, to draw values that a killed process did not record.

    What: _trial_id of a FrozenTrial.
    Why: optuna.Trial takes the storage's number of a trial, and the public number counts within a study.
    Gone: a sweep that was killed while it drew values is refused.
    """
    number = getattr(frozen, "_trial_id", None)
    if number is None:
        raise ConfigError(
            f"Optuna {optuna.__version__} does not let a trial go on that was killed while its values were drawn. "
            "Start another sweep in an empty folder, or install an older Optuna."
        )
    return optuna.Trial(study, number)
