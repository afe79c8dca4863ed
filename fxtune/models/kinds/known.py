"""Finds the kind of model of a Hugging Face config. A new kind needs a file or a package here and an entry in
KINDS."""

from __future__ import annotations

from typing import Any

from fxtune.errors import ConfigError
from fxtune.models.kinds.decoder import Decoder
from fxtune.models.kinds.embedder import Embedder
from fxtune.models.kinds.encoder import Encoder, EncoderScorer
from fxtune.models.kinds.image_decoder.images import Images
from fxtune.models.kinds.image_decoder.kind import ImageDecoder
from fxtune.models.kinds.scorer import Scorer

KINDS: tuple[Decoder, ...] = (EncoderScorer(), Encoder(), Scorer(), Embedder(), ImageDecoder(), Decoder())
"""All kinds. A config belongs to the first kind that takes it."""


def kind_of(config: Any, name: str = "model.path", own_code: bool = True) -> Decoder:
    """The kind of the model of this config. `own_code`: whether a model that runs only with code of its author counts.
    Raises ConfigError if fxtune trains no such model. The message begins with `name`."""
    for kind in KINDS:
        if kind.takes(config, own_code):
            return kind
    raise ConfigError(f"{name} is a {config.model_type} model, {why_none(config.model_type)}.")


def images_of(config: Any) -> Images:
    """How a model of this config reads images. The model must be of a kind that reads images."""
    images = kind_of(config).images
    assert images is not None, f"{config.model_type} reads no images"
    return images


def with_head(config: Any, head: str, name: str = "model.path") -> Any:
    """`config`, or a copy of it for a model with this `head` (Decoder.head) over the same body. Raises ConfigError if
    fxtune cannot make that head. The message begins with `name`."""
    kind = kind_of(config, name)
    kind.check(config, name)
    if kind.head == head:
        return config
    fitting = (each for each in KINDS if each.head == head and each.bidirectional == kind.bidirectional)
    if (wanted := next(fitting, None)) is None:
        raise ConfigError(
            f"{name} is a {config.model_type} model, an encoder: its results for a token depend on later tokens, so "
            "it cannot be trained to predict them. Use a decoder, or an objective that scores documents."
        )
    return wanted.made_from(config, kind, name)


def with_head_of_task(config: Any, task: str | None) -> Any:
    """`config`, or a copy of it for a model with the head that peft's `task` of an adapter tells."""
    head = next((kind.head for kind in KINDS if kind.task_tells_head and kind.adapter_task == task), None)
    return with_head(config, head) if head else config


def families() -> set[str]:
    """Every `model_type` that some kind takes."""
    return {family for kind in KINDS for family in kind.families}


def why_none(family: str) -> str:
    """Why no kind takes models of this `model_type`, as the end of a sentence."""
    return KINDS[-1].why_not(family)
