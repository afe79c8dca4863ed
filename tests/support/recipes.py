"""Recipes and command lines for tests of the config."""

from __future__ import annotations

from pathlib import Path

import pytest

from fxtune.config.compose import check_jobs, load, prepare
from fxtune.errors import ConfigError

QUICK = "+recipe=quickstart"


def write_recipe(text: str, name: str = "mine") -> Path:
    """Write recipes/NAME.yaml below the working directory."""
    path = Path("recipes") / f"{name}.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def refusal(*arguments: str) -> str:
    """The error message for refused overrides. With `-m` as the first argument they are a sweep."""

    def compose() -> None:
        if arguments[0] == "-m":
            check_jobs(prepare(list(arguments[1:]), multirun=True))
        else:
            load(list(arguments))

    with pytest.raises(ConfigError) as caught:
        compose()
    return str(caught.value)
