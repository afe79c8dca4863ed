"""Stored features of images in place of the passes of a frozen vision encoder (data.image_features=stored).

transformers' models call their method `get_image_features`, and put the features in place of the embeddings of image
tokens. StoredFeatures takes the place of this method on one model. A batch with stored features has them in one
dimension under the name of the pixels; pixels have at least two dimensions. Whoever gives pixels, such as generation,
gets what the vision encoder computes. Meanwhile the vision encoder is on the model's device, at other times in host
memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fxtune.models.kinds.image_decoder.families import Tensors
from fxtune.models.kinds.image_decoder.images import Images


class StoredFeatures:
    """Replaces `get_image_features` of a model without adapters, on the device of its vision encoder.

    The constructor computes the features of `example`, the tensors of an image, to see their form: a tensor, or a list
    with a tensor for each image, by family and version of transformers. It leaves the model unchanged until begin().
    """

    def __init__(self, model: Any, example: Tensors) -> None:
        images, self.model, self.width = Images(), model, model.config.get_text_config().hidden_size
        self.parts = [*images.vision_encoders(model), *images.projectors(model)]
        self.device = next(self.parts[0].parameters()).device
        self.compute = model.model.get_image_features
        found = self.compute(**example, return_dict=True)
        self.output = type(found)
        self.forms = [level.shape[1:] if isinstance(level, torch.Tensor) else None for level in _levels(found)]

    def features(self, images: Tensors) -> torch.Tensor:
        """[features, levels, width]: what the decoder gets for `images`. The first level takes the place of
        embeddings, the others are added to hidden states of decoder layers."""
        found = _levels(self.compute(**images, return_dict=True))
        levels = [[level] if isinstance(level, torch.Tensor) else level for level in found]
        return torch.stack([torch.cat([part.reshape(-1, self.width) for part in level]) for level in levels], 1)

    def begin(self) -> None:
        """Let the model take stored features, and move the vision encoder to host memory."""
        self.model.model.get_image_features = self
        self._move(torch.device("cpu"))

    @contextmanager
    def encoder_on_device(self) -> Iterator[None]:
        """A context with the vision encoder on the model's device."""
        before = next(self.parts[0].parameters()).device
        self._move(self.device)
        try:
            yield
        finally:
            self._move(before)

    def __call__(self, pixel_values: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        if pixel_values.dim() > 1:
            with self.encoder_on_device():
                return self.compute(pixel_values, *arguments, **options)
        levels = pixel_values.view(-1, len(self.forms), self.width).unbind(1)
        first, *others = [
            [level] if form is None else level.reshape(-1, *form)
            for level, form in zip(levels, self.forms, strict=True)
        ]
        return self.output(pooler_output=first, **({"deepstack_features": others} if others else {}))

    def _move(self, device: torch.device) -> None:
        for part in self.parts:
            part.to(device)


def _levels(found: Any) -> list[Any]:
    """The features in the result of get_image_features(): for embeddings, and for each of the decoder's layers."""
    return [found.pooler_output, *(getattr(found, "deepstack_features", None) or ())]
