"""The arithmetic of transformers' image processors in fewer passes over the pixels.

What: replaces `process_image`, `resize`, `rescale` and `normalize` of PilBackend, which the image processors of all
  families inherit.
Why: PilBackend copies the whole picture five times, resizes it with Pillow, and rescales it as float64. A picture of
  12 megapixels takes 183 ms with PilBackend, and 36 ms with this module (docs/log.md). transformers' other backend
  needs torchvision, whose build on PyPI does not load beside the CPU build of torch.

torch's uint8 kernel, which torchvision also calls, resizes the images. Its rounding differs from Pillow's: by 0.2 of
255 levels on average in tall, narrow images, and in one value of 300 in other images. Both differ from exact
arithmetic by 0.1 to 0.2 levels. Pillow still applies the filters that the kernel lacks, such as Lanczos.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.nn import functional as F
from transformers.image_processing_backends import PilBackend
from transformers.image_transforms import get_resize_output_image_size
from transformers.image_utils import ChannelDimension, SizeDict

MODES = {None: "bilinear", Image.Resampling.BILINEAR: "bilinear", Image.Resampling.BICUBIC: "bicubic"}
"""Pillow's filter -> its name in torch. None: PilBackend's default."""


def blank(image_processor: Any, height: int, width: int) -> Any:
    """A black image for `image_processor`. A processor of FewerPasses resizes it at no cost."""
    return _blank(height, width) if isinstance(image_processor, FewerPasses) else Image.new("RGB", (width, height))


def _blank(height: int, width: int) -> np.ndarray:
    """A black image, uint8 [3, height, width], that takes one byte of memory."""
    return np.broadcast_to(np.uint8(0), (3, height, width))


def _is_blank(image: Any) -> bool:
    return isinstance(image, np.ndarray) and not any(image.strides)


class FewerPasses(PilBackend):
    """A base class that replaces methods of PilBackend for an image processor, see with_fewer_passes()."""

    family: type
    """The class of the image processor in transformers."""

    def process_image(self, image: Any, *args: Any, **options: Any) -> np.ndarray:
        if _is_blank(image):
            return image
        if isinstance(image, Image.Image) and image.mode == "RGB":
            return np.array(image).transpose(2, 0, 1)
        return super().process_image(image, *args, **options)

    def resize(  # type: ignore[override]
        self, image: np.ndarray, size: SizeDict, resample: Any = None, **options: Any
    ) -> np.ndarray:
        if size.shortest_edge and not size.longest_edge:
            side = size.shortest_edge
            first = ChannelDimension.FIRST
            target = get_resize_output_image_size(image, side, default_to_square=False, input_data_format=first)
        elif size.height and size.width and not (size.shortest_edge or size.max_height):
            target = size.height, size.width
        else:
            return super().resize(image, size, resample=resample, **options)
        if image.shape[-2:] == tuple(target):
            return image
        if _is_blank(image):
            return _blank(*target)
        if resample not in MODES or image.dtype != np.uint8 or len(image) != 3:
            return super().resize(image, size, resample=resample, **options)
        pixels = torch.from_numpy(image)[None]
        resized = F.interpolate(pixels, size=tuple(target), mode=MODES[resample], antialias=True)
        return resized[0].contiguous().numpy()  # one channel after the other makes the next passes faster

    def rescale(self, image: np.ndarray, scale: float, **options: Any) -> np.ndarray:  # type: ignore[override]
        scaled = image.astype(np.float32, order="C")
        scaled *= np.float32(scale)
        return scaled

    def normalize(  # type: ignore[override]
        self, image: np.ndarray, mean: Any, std: Any, **options: Any
    ) -> np.ndarray:
        mean, std = (np.asarray(values, np.float32).reshape(-1, 1, 1) for values in (mean, std))
        normalized = image.astype(np.float32)
        normalized -= mean
        normalized /= std
        return normalized

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _restored, (self.family, vars(self))


class _ResizedByMethod:
    """A base class for Gemma 4's image processor: calls resize() where the family resizes by a function of its own."""

    def aspect_ratio_preserving_resize(
        self, image: np.ndarray, patch_size: int, max_patches: int, pooling_kernel_size: int, resample: Any
    ) -> np.ndarray:
        size = _proportional(self.family)(*image.shape[-2:], patch_size, max_patches, pooling_kernel_size)  # type: ignore[attr-defined]
        return self.resize(image, SizeDict(height=size[0], width=size[1]), resample)  # type: ignore[attr-defined]


def _proportional(family: type) -> Any:
    """Gemma 4's function from (height, width, patch_size, max_patches, pooling_kernel_size) to the resized (height,
    width); None for another family."""
    return getattr(sys.modules[family.__module__], "get_aspect_ratio_preserving_size", None)


@functools.cache
def _class_between(family: type) -> type:
    before = (_ResizedByMethod,) if _proportional(family) and hasattr(family, "aspect_ratio_preserving_resize") else ()
    return type(family.__name__, (*before, family, FewerPasses), {"family": family})


def with_fewer_passes(image_processor: Any) -> Any:
    """`image_processor` with the same settings and fewer passes. A processor of another backend is not changed."""
    if not isinstance(image_processor, PilBackend):
        return image_processor
    return _restored(type(image_processor), vars(image_processor))


def _restored(family: type, settings: dict[str, Any]) -> Any:
    made: Any = object.__new__(_class_between(family))
    vars(made).update(settings)
    return made
