"""Which kind of model a Hugging Face config has. A new kind is a file beside this one and an entry of KINDS."""

from __future__ import annotations

from typing import Any

from fxtune.errors import ConfigError
from fxtune.models.kinds.base import Kind
from fxtune.models.kinds.decoder import Decoder

KINDS: tuple[Kind, ...] = (Decoder(),)
"""The first kind that takes a config has it."""


def kind_of(config: Any, name: str = "model.path", own_code: bool = True) -> Kind:
    """The kind of the model of this config. `own_code`: whether the author's code counts. Raises ConfigError, which
    begins with `name`, if fxtune trains no such model."""
    for kind in KINDS:
        if config.model_type in kind.families or (own_code and kind.is_in_own_code(config)):
            return kind
    raise ConfigError(f"{name} is a {config.model_type} model, {why_none(config.model_type)}.")


def families() -> set[str]:
    """Every `model_type` that some kind takes."""
    return {family for kind in KINDS for family in kind.families}


def why_none(family: str) -> str:
    """Why no kind takes models of this `model_type`, as the end of a sentence."""
    return "; ".join(kind.why_not(family) for kind in KINDS)
