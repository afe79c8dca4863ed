"""Which kind of model a Hugging Face config has. A new kind is a file beside this one and an entry of KINDS."""

from __future__ import annotations

import copy
from typing import Any

from fxtune.errors import ConfigError
from fxtune.models.kinds.decoder import Decoder
from fxtune.models.kinds.image_decoder import ImageDecoder
from fxtune.models.kinds.scorer import Scorer

SCORER = Scorer()
KINDS: tuple[Decoder, ...] = (SCORER, ImageDecoder(), Decoder())
"""The first kind that takes a config has it."""


def kind_of(config: Any, name: str = "model.path", own_code: bool = True) -> Decoder:
    """The kind of the model of this config. `own_code`: whether the author's code counts. Raises ConfigError, which
    begins with `name`, if fxtune trains no such model."""
    for kind in KINDS:
        if kind.takes(config, own_code):
            return kind
    raise ConfigError(f"{name} is a {config.model_type} model, {why_none(config.model_type)}.")


def with_head(config: Any, head: str, name: str = "model.path") -> Any:
    """`config`, or a copy of it for a model with this `head` (Decoder.head) over the same body. Raises ConfigError,
    which begins with `name`, if fxtune cannot make that head."""
    kind = kind_of(config, name)
    if kind is SCORER:
        SCORER.require_one_score(config, name)
    if kind.head == head:
        return config
    if head != SCORER.head:
        raise ConfigError(
            f"{name} gives a score for a document ({config.architectures[0]}) and no log-probabilities of tokens. Use "
            "the model that it was made from, or objective=reward."
        )
    if config.model_type not in SCORER.families:
        raise ConfigError(f"{name} is a {config.model_type} model, {SCORER.why_not(config.model_type)}. Use another.")
    config = copy.deepcopy(config)
    SCORER.become(config)
    if not SCORER.scores_by_linear(config):
        raise ConfigError(
            f"{name} is a {config.model_type} model, which has another head for scores. Use another model."
        )
    return config


def families() -> set[str]:
    """Every `model_type` that some kind takes."""
    return {family for kind in KINDS for family in kind.families}


def why_none(family: str) -> str:
    """Why no kind takes models of this `model_type`, as the end of a sentence."""
    return KINDS[-1].why_not(family)
