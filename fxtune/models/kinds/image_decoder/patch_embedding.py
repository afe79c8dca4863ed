"""Patch embeddings of vision encoders as one matrix product.

A patch embedding is a convolution whose stride equals its kernel size. Patches do not overlap, so the convolution is a
product of the flattened patches and the flattened kernel. The product may be a hundred times faster: in bfloat16 cuDNN
has no good kernel for the three dimensions of Qwen's patches (3.7 s a call on an H100 in sglang-omni#539). The vision
encoders of families.py have no other convolution, so cuDNN's autotuner and channels-last memory would change nothing.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from fxtune.models.kinds.known import kind_of
from fxtune.models.replacement import InPlaceOf, places, put


class PatchEmbedding(InPlaceOf):
    """Replaces a convolution without overlap. The weight keeps the convolution's shape [width, channels, *kernel],
    also in files."""

    kernel_size: tuple[int, ...]
    weight: Tensor
    bias: Tensor | None

    def forward(self, pixels: Tensor) -> Tensor:
        """Turn pixels [images, channels, *sizes] into [images, width, *counts]. `counts`: whole patches along each
        side."""
        images, channels, *sizes = pixels.shape
        counts = [size // side for size, side in zip(sizes, self.kernel_size, strict=True)]
        for dimension, (count, side) in enumerate(zip(counts, self.kernel_size, strict=True), 2):
            pixels = pixels.narrow(dimension, 0, count * side)
        split = [number for pair in zip(counts, self.kernel_size, strict=True) for number in pair]
        axes = range(2, 2 + len(split))
        patches = pixels.reshape(images, channels, *split).permute(0, *axes[::2], 1, *axes[1::2])
        flat = patches.reshape(images * math.prod(counts), channels * math.prod(self.kernel_size))
        return F.linear(flat, self.weight.flatten(1), self.bias).view(images, *counts, -1).movedim(-1, 1)


def replace_patch_embeddings(model: Any) -> None:
    """Replace the patch embeddings in the vision encoders of a model by products. Names and weights stay."""
    where, images = places(model), kind_of(model.config).images
    for encoder in images.vision_encoders(model) if images else ():
        for module in [*encoder.modules()]:
            if _is_patch_embedding(module):
                put(where, module, PatchEmbedding(module))


def _is_patch_embedding(module: Any) -> bool:
    if type(module) not in (nn.Conv2d, nn.Conv3d) or tuple(module.kernel_size) != tuple(module.stride):
        return False
    padded = module.padding != "valid" and any(module.padding)
    return not padded and module.groups == 1 and set(module.dilation) == {1}
