"""The processor of a model that reads images, with the tokenizer and the settings of a run."""

from __future__ import annotations

from typing import Any

import torch

from fxtune.data.config import DataConfig
from fxtune.data.images.processor import ImageProcessor
from fxtune.models.kinds.known import kind_of
from fxtune.models.load import ModelConfig, load_config, load_processor


def image_processor(
    model: ModelConfig, data: DataConfig, tokenizer: Any, hf_config: Any = None, weights: str = "float32"
) -> ImageProcessor | None:
    """None for a model that reads no images, or has no files that say how. `hf_config`: by default of load_config().
    `weights`: the dtype of the model's weights (Facts.dtype).

    Raises ConfigError if data.image_tokens does not act on the model, StorageError if the files cannot be read.
    """
    hf_config = hf_config or load_config(model)
    kind = kind_of(hf_config)
    processor = load_processor(model, hf_config, tokenizer) if kind.reads_images else None
    if processor is None:
        data.image_tokens.require_unset()
        return None
    pixels = kind.pixel_dtype(hf_config, getattr(torch, weights))
    made = ImageProcessor(processor, kind.merge(hf_config), kind.rope_positions(hf_config), pixels)
    made.bound(data.image_tokens.min, data.image_tokens.max)
    return made
