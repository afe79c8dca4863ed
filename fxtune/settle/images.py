"""The image processor of a model, and refusals of rows with images after the data is read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from fxtune.config.root import Config
from fxtune.data.config import DataConfig, ImageTokensConfig
from fxtune.data.images.processor import ImageProcessor
from fxtune.errors import ConfigError
from fxtune.facts.run import Facts
from fxtune.models.kinds.known import kind_of
from fxtune.models.load import ModelConfig, load_config, load_processor
from fxtune.techniques.pipeline import Pipeline


def image_processor(
    model: ModelConfig, data: DataConfig, tokenizer: Any, hf_config: Any = None, weights: str = "float32"
) -> ImageProcessor | None:
    """The image processor of a model; None if the model reads no images or has no processor files. `hf_config`: the
    model's config; None: load_config() reads it. `weights`: the dtype of the model's weights (Facts.dtype).

    Raises ConfigError if data.image_tokens has no effect on the model, StorageError if files cannot be read.
    """
    hf_config = hf_config or load_config(model)
    images = kind_of(hf_config).images
    processor = load_processor(model, hf_config, tokenizer) if images else None
    if images is None or processor is None:
        if data.image_tokens != ImageTokensConfig():
            raise ConfigError(
                "data.image_tokens is for models that read images, and this model reads text. Leave it out."
            )
        return None
    pixels = images.pixel_dtype(hf_config, getattr(torch, weights))
    made = ImageProcessor(processor, images.merge(hf_config), images.rope_positions(hf_config), pixels)
    made.bound(data.image_tokens.min, data.image_tokens.max)
    return made


def stored_refusals(config: Config, facts: Facts) -> Iterator[str]:
    """Yield each reason why features of images cannot be stored (data.image_features=stored), with what to change."""
    lora, objective, vision = config.techniques.lora, config.objective, facts.model.get("vision_config") or {}
    dropped = [name for name, rate in vision.items() if "drop" in name and isinstance(rate, float) and rate > 0]
    reasons = {
        "the model reads no images": not facts.reads_images,
        "techniques.lora.vision trains the vision encoder": lora.enabled and lora.vision,
        "techniques.lora.projector trains the projector": lora.enabled and lora.projector,
        "optimizer.lr_vision trains the vision encoder": config.optimizer.lr_vision is not None,
        f"the vision encoder has dropout ({', '.join(dropped)} of its config)": bool(dropped),
        f"objective={objective.name} makes its rows in each step": objective.needs.rollouts,
        "the teacher reads the images of each step": facts.frozen is not None,
    }
    for reason in (reason for reason, holds in reasons.items() if holds and facts.stores_images):
        yield f"data.image_features: stored, but {reason}. Set it to computed."


def refusals(config: Config, techniques: Pipeline, facts: Facts, trains: bool, has_images: bool) -> Iterator[str]:
    """Yield each reason why a run cannot train on its rows: the key, and what to change. `facts` must include what the
    read data shows. `trains`: whether training rows have images. `has_images`: whether training or evaluation rows
    have images."""
    if not trains and facts.stores_images:
        yield "data.image_features: stored, but no row of data.sources has an image. Leave it out."
    if not trains:
        asked = {
            "techniques.lora.vision": techniques.lora.enabled and techniques.lora.vision,
            "techniques.lora.projector": techniques.lora.enabled and techniques.lora.projector,
            "optimizer.lr_vision": config.optimizer.lr_vision is not None,
        }
        if keys := [key for key, is_asked in asked.items() if is_asked]:
            yield f"{', '.join(keys)}: no row of data.sources has an image to train it. Leave it out."
    if not has_images:
        return
    if facts.degrees.context > 1:
        yield "parallel.context: rows with images cannot be cut into pieces. Set it to 1."
    if facts.images_see_both_ways and facts.shares_prompts:
        yield (
            f"data.share_prompts: true, but the tokens of an image in {facts.model.get('model_type')} see each other, "
            "which needs the prompt of each answer in its row. Set it to false."
        )
    # The techniques were checked before without images. With images Gemma's attention needs a mask, and CUDA graphs
    # are impossible.
    for name, technique in techniques.enabled():
        yield from (f"techniques.{name}.{reason}" for reason in technique.check(facts))
