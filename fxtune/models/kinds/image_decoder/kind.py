"""Decoders that also read images: AutoModelForImageTextToText of transformers.

A vision encoder turns the patches of an image into features, a projector brings the features to the width of the
language model, and these features replace the embeddings of placeholder tokens. The language model is a decoder like
any other, and techniques act on it alone. Rows without images pass through the language model and its head only.

Besides the names of the parts, families differ in:

- Positions. Rotary embeddings of Qwen's models have three axes (M-RoPE): a token of text counts on all axes, a token
  of an image has its time, row and column. transformers computes these positions for one document a row, so
  rope_positions() computes them here, a document at a time. forward() gets four axes: the first has the positions of
  the text, by which transformers tells packed documents apart.
- Attention. In Gemma 3, and in Gemma 4 by its config, all tokens of an image see each other.
- Tensors. Vision encoders with images of one size take a batch of them, Qwen's take the patches of all images in one
  list, and Idefics has a dimension for documents. merge() joins the tensors of several documents.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

from fxtune.models.kinds.beside import Beside
from fxtune.models.kinds.decoder import Decoder
from fxtune.models.kinds.image_decoder.cost import BesideOfImages
from fxtune.models.kinds.image_decoder.families import FAMILIES
from fxtune.models.kinds.image_decoder.images import Images


class ImageDecoder(Decoder):
    auto_class = "AutoModelForImageTextToText"
    mapping = "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING"
    pipeline_tag = "image-text-to-text"
    images = Images()

    @property
    def families(self) -> Collection[str]:
        return FAMILIES.keys() & self.classes.keys()

    def takes(self, config: Any, own_code: bool = True) -> bool:
        return config.model_type in self.families and getattr(config, "vision_config", None) is not None

    def beside(self, model: Any) -> Beside:
        return BesideOfImages.of(self.images, model, super().beside(model).parameters)

    def body(self, model: Any) -> nn.Module:
        return model.model

    def untrained_parts(self, config: Any) -> str:
        return "its language model and head are trained; its vision encoder and projector stay (optimizer.lr_vision)"
