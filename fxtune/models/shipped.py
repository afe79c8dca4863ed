"""Configs of published models that ship with fxtune. Commands that need no weights use them if the hub cannot be
reached.

`fxtune plan`, and runs with model.init=random, need only a model's config. fxtune/assets/model_configs.json has the
configs of some 190 models, each with its source. Files in the hub's cache are preferred. So a plan needs no network,
and a plan of a gated model needs no token.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any

from fxtune.errors import HubError, did_you_mean
from fxtune.system.files.hub import GatedError, locate
from fxtune.system.terminal.console import say


@dataclass(frozen=True)
class ShippedConfig:
    ids: tuple[str, ...]
    """The hub ids of the models that have this config."""
    billions: float
    """Parameters as published."""
    source: str
    config: dict[str, Any]
    """Values of a config.json, including `model_type`."""


@lru_cache(maxsize=1)
def shipped_configs() -> dict[str, ShippedConfig]:
    file = resources.files("fxtune") / "assets" / "model_configs.json"
    entries = [ShippedConfig(**entry) for entry in json.loads(file.read_text(encoding="utf-8"))["models"]]
    return {name: entry for entry in entries for name in entry.ids}


@lru_cache
def config_without_hub(path: str, revision: str | None, key: str = "model.path") -> ShippedConfig | None:
    """The shipped config of the model `path`, which the recipe names by `key`; None if the hub or its cache has the
    model. Prints a line if the shipped config is used.

    Raises HubError if the model's config does not ship with fxtune, and other errors as locate() does.
    """
    try:
        locate(path, revision, key)
        return None
    except (HubError, GatedError) as error:
        if (found := shipped_configs().get(path)) is None:
            raise HubError(
                f"{error} No config of this name ships with fxtune{did_you_mean(path, shipped_configs())} A "
                "model.architecture (model_type and its sizes) with model.init=random needs no hub."
            ) from error
        why = "the model is gated" if isinstance(error, GatedError) else "the hub cannot be reached"
        say(f"{key}={path}: {why}, so the config that ships with fxtune is used (from {found.source}).")
        return found
