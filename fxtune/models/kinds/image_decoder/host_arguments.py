"""Computes arguments of vision encoders on the host. It serves Qwen's and Pixtral's, which take the patches of all
images in one list.

These vision encoders attend within each image, or within windows of an image. The sizes of the images determine the
bounds of images and windows, and the positions of patches. transformers computes bounds and positions on the device,
and the host waits for the device several times. Here the host computes them with transformers' functions from the
sizes, which are still on the host (ON_HOST of data/batches/batch.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

LEAST_BOUND = 64
"""The least upper bound that is passed for the lengths of images or windows."""


def takes_bounds(encoder: Any) -> bool:
    """Whether a vision encoder passes the bounds of images to attention backends with `flash` in their names, and
    FlashAttention supports its head size."""
    config = encoder.config
    family = config.model_type
    if family != "pixtral" and not family.startswith("qwen"):
        return False
    heads = getattr(config, "num_heads", None) or config.num_attention_heads
    width = getattr(config, "embed_dim", None) or config.hidden_size
    return not getattr(config, "attention_dropout", 0.0) and width // heads % 8 == 0


def qwen_arguments(encoder: Any, grid: Tensor) -> dict[str, Any]:
    """Compute on the host the arguments that a Qwen vision encoder would compute from `grid_thw` [images, 3]
    (transformers.vision_utils). Upper bounds of lengths are powers of two, because compiled code and kernels may be
    specialized for their values."""
    from transformers import vision_utils

    grid, merged = grid.cpu(), encoder.spatial_merge_size
    bounds = vision_utils.get_vision_cu_seqlens(grid)
    places: dict[str, Any] = {
        "position_ids": vision_utils.get_vision_position_ids(grid, merged),
        "cu_seqlens": bounds,
        "max_seqlen": _longest(bounds),
    }
    if hasattr(encoder, "window_size"):
        index, windows = vision_utils.get_vision_window_index(grid, merged, encoder.window_size, encoder.patch_size)
        places |= {"window_index": index, "cu_window_seqlens": windows, "max_window_seqlen": _longest(windows)}
    if hasattr(encoder, "num_grid_per_side"):
        places["interp_indices"], places["interp_weights"] = vision_utils.get_vision_interpolation_indices_and_weights(
            grid,
            encoder.num_grid_per_side,
            encoder.interpolation_mode,
            encoder.interpolation_align_corners,
            spatial_merge_size=merged,
        )
    return places


def pixtral_bounds(encoder: Any, pixels: Tensor, sizes: Tensor | None) -> dict[str, Any]:
    """The bounds of images in Pixtral's vision encoder, as arguments of attention by name. transformers 5.17 passes no
    bounds; transformers 5.24 passes bounds that it computes itself. `sizes` [images, 2]: heights and widths in pixels;
    None: images have the size of `pixels`."""
    sizes = torch.tensor([pixels.shape[-2:]] * len(pixels)) if sizes is None else sizes.cpu()
    bounds = F.pad((sizes // encoder.patch_size).prod(-1).cumsum(0, dtype=torch.int32), (1, 0))
    longest = _longest(bounds)
    return dict(cu_seq_lens_q=bounds, cu_seq_lens_k=bounds, max_length_q=longest, max_length_k=longest)


def _longest(bounds: Tensor) -> int:
    return max(LEAST_BOUND, 1 << (int(bounds.diff().max()) - 1).bit_length())
