"""Families of decoders that read images: the names of their parts and the shapes of their image tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from fxtune.models.kinds.image_decoder.encoder_shape import EncoderShape
from fxtune.upstream.transformers import tiles_of_image

Tensors = dict[str, torch.Tensor]


def concatenated(documents: Sequence[Tensors]) -> Tensors:
    """Join the image tensors of all documents along the first dimension."""
    return {name: torch.cat([tensors[name] for tensors in documents]) for name in documents[0]}


def padded_to_largest(documents: Sequence[Tensors]) -> Tensors:
    """Join as concatenated() does, after padding images, or sets of tiles, with zeros at their ends to one size."""
    return {name: torch.cat(_alike([tensors[name] for tensors in documents], 1)) for name in documents[0]}


def in_one_row(documents: Sequence[Tensors]) -> Tensors:
    """Join Idefics' tensors, [1, images, ...] for each document, as if one document had all images."""
    return {name: torch.cat(_alike([tensors[name] for tensors in documents], 2), 1) for name in documents[0]}


def _alike(tensors: list[torch.Tensor], first: int) -> list[torch.Tensor]:
    """`tensors`, padded with zeros at their ends so that all dimensions from number `first` on have one size."""
    sizes = [max(sizes) for sizes in zip(*(tensor.shape[first:] for tensor in tensors), strict=True)]

    def pad(tensor: torch.Tensor) -> torch.Tensor:
        missing = [size - own for size, own in zip(sizes, tensor.shape[first:], strict=True)]
        return F.pad(tensor, [end for count in reversed(missing) for end in (0, count)]) if any(missing) else tensor

    return [pad(tensor) for tensor in tensors]


def divided(images: Tensors, counts: Sequence[int]) -> list[Tensors]:
    """The inverse of concatenated() and padded_to_largest(). `counts`: how many images each document has. Padding
    stays."""
    parts = {name: tensor.split([*counts]) for name, tensor in images.items() if name != "batch_num_images"}
    found = [{name: of_documents[index] for name, of_documents in parts.items()} for index in range(len(counts))]
    if "batch_num_images" in images:
        for own, count in zip(found, counts, strict=True):
            own["batch_num_images"] = images["batch_num_images"].new_tensor([count])
    return found


def divided_patches(images: Tensors, counts: Sequence[int]) -> list[Tensors]:
    """Divide as divided() does, for tensors that list the patches of all images."""
    grids = images["image_grid_thw"].split([*counts])
    patches = images["pixel_values"].split([int(grid.prod(-1).sum()) for grid in grids])
    return [{"pixel_values": pixels, "image_grid_thw": grid} for pixels, grid in zip(patches, grids, strict=True)]


def divided_row(images: Tensors, counts: Sequence[int]) -> list[Tensors]:
    """The inverse of in_one_row()."""
    parts = {name: tensor.split([*counts], 1) for name, tensor in images.items()}
    return [{name: of_documents[index] for name, of_documents in parts.items()} for index in range(len(counts))]


@dataclass(frozen=True)
class Family:
    """Where the parts of a family's models are, below `model.model`, and the shapes of its image tensors."""

    encoder: str
    projector: tuple[str, ...]
    """Names of modules. They may be inside the vision encoder."""
    example: Callable[[Any], Tensors]
    """Makes the arguments of forward() for one small image from a config."""
    shape: Callable[[Any], EncoderShape]
    """Makes the vision encoder's shape from a config."""
    merge: Callable[[Sequence[Tensors]], Tensors] = concatenated
    divide: Callable[[Tensors, Sequence[int]], list[Tensors]] = divided
    token_types: str = ""
    """The name of the argument of forward() that says which tokens belong to an image."""
    casts_pixels: bool = True
    """Whether forward() casts the pixels to the dtype of the vision encoder's weights."""
    m_rope: bool = False
    two_way: Callable[[Any], bool] = lambda config: False
    """Decides from a config whether the tokens of an image see each other."""


def _numbers(*shape: int) -> torch.Tensor:
    """Made-up pixels, as after normalization. No pixel is 0, and no two rows of patches are alike."""
    return torch.sin(torch.arange(math.prod(shape)) * 0.7 + 0.5).view(shape)


def _patches(config: Any) -> Tensors:
    vision = config.vision_config
    rows, columns = vision.spatial_merge_size, 2 * vision.spatial_merge_size
    width = getattr(vision, "in_channels", None) or vision.in_chans
    pixels = _numbers(rows * columns, width * vision.temporal_patch_size * vision.patch_size**2)
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, rows, columns]])}


def _side(config: Any) -> int:
    size = config.vision_config.image_size
    return int(size if isinstance(size, int) else size[0])


def _square(config: Any) -> Tensors:
    if config.vision_config.model_type == "pixtral":
        side = 2 * config.vision_config.patch_size * getattr(config, "spatial_merge_size", 1)
        return {"pixel_values": _numbers(1, 3, side, side), "image_sizes": torch.tensor([[side, side]])}
    return {"pixel_values": _numbers(1, 3, _side(config), _side(config))}


def _tiles(config: Any) -> Tensors:
    side, (height, width) = _side(config), config.image_grid_pinpoints[0]
    tiles = -(-height // side) * -(-width // side) + 1
    sizes, one = torch.tensor([[height, width]]), torch.tensor([1])
    return {"pixel_values": _numbers(1, tiles, 3, side, side), "image_sizes": sizes, "batch_num_images": one}


def _in_a_row(config: Any) -> Tensors:
    side = _side(config)
    mask = torch.ones(1, 1, side, side, dtype=torch.bool)
    return {"pixel_values": _numbers(1, 1, 3, side, side), "pixel_attention_mask": mask}


def _listed_patches(config: Any) -> Tensors:
    vision = config.vision_config
    side = 2 * vision.pooling_kernel_size
    at = torch.arange(side)
    places = torch.stack([at.repeat(side), at.repeat_interleave(side)], -1)[None]
    return {"pixel_values": _numbers(1, side * side, 3 * vision.patch_size**2), "image_position_ids": places}


def _merged_squares(config: Any) -> EncoderShape:
    """The shape of Qwen's vision encoders: a square of patches becomes one feature. In Qwen2.5-VL most layers attend
    in windows."""
    vision = config.vision_config
    side = vision.spatial_merge_size
    window = getattr(vision, "window_size", 0) // (side * vision.patch_size) * side
    full = len(getattr(vision, "fullatt_block_indexes", ()))
    levels = 1 + len(getattr(vision, "deepstack_visual_indexes", None) or ())
    return _encoder_shape(config, merged=float(side**2), window=window**2, full_layers=full, levels=levels)


def _squares(config: Any) -> EncoderShape:
    """The shape of vision encoders that take images or tiles of one size and make one feature of a square of
    patches."""
    vision = config.vision_config
    if vision.model_type == "pixtral":
        return _encoder_shape(config, merged=float(getattr(config, "spatial_merge_size", 1) ** 2))
    patch = vision.patch_size if isinstance(vision.patch_size, int) else vision.patch_size[0]
    patches = (_side(config) // patch) ** 2
    extra = vision.model_type in ("clip_vision_model", "internvl_vision")
    features = getattr(config, "mm_tokens_per_image", None)
    if features is None:
        joined = getattr(config, "scale_factor", None) or 1 / getattr(config, "downsample_ratio", 1)
        features = round(patches / joined**2)
    if getattr(config, "vision_feature_select_strategy", "default") == "full" and extra:
        features += 1  # the class token's feature
    return _encoder_shape(config, merged=patches / features, tile=features, extra=int(extra))


def _tiled(config: Any) -> EncoderShape:
    """The shape of LLaVA-OneVision's encoder. An image is one tile as a whole, and more tiles by its size."""

    def tiles(heights: np.ndarray, widths: np.ndarray) -> np.ndarray:
        sizes, which = np.unique(np.stack([heights, widths], -1), axis=0, return_inverse=True)
        pinpoints = [list(pinpoint) for pinpoint in config.image_grid_pinpoints]
        counts = [tiles_of_image(size, pinpoints, _side(config)) for size in sizes.tolist()]
        return np.array(counts, np.int64)[which.reshape(-1)]

    return replace(_squares(config), tiles=tiles)


def _encoder_shape(config: Any, **more: Any) -> EncoderShape:
    vision = config.vision_config
    layers = getattr(vision, "depth", None) or vision.num_hidden_layers
    width = getattr(vision, "embed_dim", None) or vision.hidden_size  # Qwen2-VL's hidden_size is the decoder's
    heads = getattr(vision, "num_heads", None) or vision.num_attention_heads
    heads_width = heads * (getattr(vision, "head_dim", None) or width // heads)
    inner = getattr(vision, "intermediate_size", None) or int(width * vision.mlp_ratio)
    return EncoderShape(layers, width, heads_width, inner, **more)


_QWEN = partial(
    Family,
    "visual",
    example=_patches,
    shape=_merged_squares,
    m_rope=True,
    divide=divided_patches,
    token_types="mm_token_type_ids",
)
_BESIDE = partial(Family, "vision_tower", ("multi_modal_projector",), shape=_squares)
_IDEFICS = Family(
    "vision_model", ("connector",), example=_in_a_row, shape=_squares, merge=in_one_row, divide=divided_row
)
FAMILIES: dict[str, Family] = {
    "qwen2_vl": _QWEN(projector=("visual.merger",)),
    "qwen2_5_vl": _QWEN(projector=("visual.merger",)),
    "qwen3_vl": _QWEN(projector=("visual.merger", "visual.deepstack_merger_list")),
    "qwen3_vl_moe": _QWEN(projector=("visual.merger", "visual.deepstack_merger_list")),
    "qwen3_5": _QWEN(projector=("visual.merger",)),
    "qwen3_5_moe": _QWEN(projector=("visual.merger",)),
    "gemma3": _BESIDE(example=_square, two_way=lambda config: True, token_types="token_type_ids"),
    "gemma4": Family(
        "vision_tower",
        ("embed_vision",),
        example=_listed_patches,
        casts_pixels=False,
        shape=lambda config: _encoder_shape(config, merged=float(config.vision_config.pooling_kernel_size**2)),
        token_types="mm_token_type_ids",
        two_way=lambda config: config.text_config.use_bidirectional_attention == "vision",
    ),
    "internvl": _BESIDE(example=_square),
    "llava": _BESIDE(example=_square, merge=padded_to_largest),
    "llava_onevision": _BESIDE(example=_tiles, shape=_tiled, merge=padded_to_largest),
    "mistral3": _BESIDE(example=_square, merge=padded_to_largest),
    "smolvlm": _IDEFICS,
    "idefics3": _IDEFICS,
}
"""The families by `model_type`. tests/models/kinds/image_decoder/test_images.py compares each family with plain
transformers."""
