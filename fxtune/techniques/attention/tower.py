"""Towers for images: the arguments of a call, and attention that takes all images at once.

Qwen's and Pixtral's towers take the patches of all images in one list and attend within each image, or within windows
of an image. Two things cost time there, and neither changes a number:

- Where images and windows begin, and where their patches are, follows from the sizes of the images. transformers
  computes it on the device and waits for the result several times. prepare() computes it on the host by transformers'
  own functions, which read sizes that are still on the host (ON_HOST of data/batches/batch.py), and sends it along.
- For attention whose name does not contain `flash`, transformers splits queries, keys and values by images and calls
  attention once for each image or window, thousands of times a pass, after it has waited for their lengths. Here one
  call of FlashAttention takes the bounds.

Other towers take images of one size as a batch, which torch's attention computes without a mask by FlashAttention.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxtune.kernels import flash4 as kernel
from fxtune.kernels.autocast import compute_dtype
from fxtune.models.kinds.known import kind_of
from fxtune.models.structure import tower_layers, towers
from fxtune.system.profiler import observe_operators
from fxtune.techniques.attention.backends.backend import Backend
from fxtune.techniques.attention.backends.flash4 import FLASH4
from fxtune.techniques.attention.backends.sdpa import BY_DOCUMENTS
from fxtune.techniques.attention.inputs import OF_DOCUMENTS
from fxtune.upstream.torch import attention_operator
from fxtune.upstream.transformers import attention_of, set_attention

Core = Callable[[Tensor, Tensor, Tensor, Tensor, int, float], Tensor]
"""(q, k, v, bounds, an upper bound on the lengths, scale) -> out; all but `bounds` as [patches, heads, d]."""
LEAST_BOUND = 64
"""The least upper bound on the lengths of images and windows."""


def flash2(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, scale: float) -> Tensor:
    out: Tensor = attention_operator("_flash_attention_forward")(
        q, k, v, bounds, bounds, longest, longest, 0.0, False, False, scale=scale
    )[0]
    return out


def flash4(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, scale: float) -> Tensor:
    """On a CPU in plain torch, image by image."""
    out: Tensor = kernel.flash4(q, k, v, bounds, longest, scale, 0, 0.0, causal=False)[0]
    return out


CORES: dict[str, tuple[Core, Backend]] = {
    "fxtune_tower_flash2": (flash2, BY_DOCUMENTS),
    "fxtune_tower_flash4": (flash4, FLASH4),
}
"""By the name in transformers' registry: the core, and the backend that has the same operator."""


def prepare(model: nn.Module) -> None:
    """Let the towers of a model run on what follows from the sizes of images alone, computed on the host, and without
    the bounds of the text's documents, which some families hand on to them."""

    def arguments(tower: Any, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        named = {name: value for name, value in named.items() if name not in OF_DOCUMENTS}
        if (grid := named.get("grid_thw")) is not None:
            places = places_of(tower, grid)
            # Where transformers splits by the bounds of images, it reads them on the host.
            stay = () if attends_at_once(tower) else ("cu_seqlens", "cu_window_seqlens")
            sent = {name: value for name, value in places.items() if name not in stay}
            named = {**places, **_on(given[0].device, sent), **named}
        elif attends_at_once(tower):
            named |= _on(given[0].device, _bounds(tower, given[0], named.get("image_sizes")))
        return given, named

    for tower in towers(model):
        tower.register_forward_pre_hook(arguments, with_kwargs=True)


def places_of(tower: Any, grid: Tensor) -> dict[str, Any]:
    """What a tower of Qwen's would compute from its argument `grid_thw` [images, 3], on the host, by the names of its
    further arguments (transformers.vision_utils). Upper bounds of lengths are powers of two, because compiled code
    and kernels may depend on them."""
    from transformers import vision_utils

    grid, merged = grid.cpu(), tower.spatial_merge_size
    bounds = vision_utils.get_vision_cu_seqlens(grid)
    places: dict[str, Any] = {
        "position_ids": vision_utils.get_vision_position_ids(grid, merged),
        "cu_seqlens": bounds,
        "max_seqlen": _longest(bounds),
    }
    if hasattr(tower, "window_size"):
        index, windows = vision_utils.get_vision_window_index(grid, merged, tower.window_size, tower.patch_size)
        places |= {"window_index": index, "cu_window_seqlens": windows, "max_window_seqlen": _longest(windows)}
    if hasattr(tower, "num_grid_per_side"):
        places["interp_indices"], places["interp_weights"] = vision_utils.get_vision_interpolation_indices_and_weights(
            grid,
            tower.num_grid_per_side,
            tower.interpolation_mode,
            tower.interpolation_align_corners,
            spatial_merge_size=merged,
        )
    return places


def _bounds(tower: Any, pixels: Tensor, sizes: Tensor | None) -> dict[str, Any]:
    """The bounds of the images of Pixtral's tower, by the names of attention's arguments. transformers 5.17 passes
    none, 5.24 its own. `sizes` [images, 2]: height and width in pixels; None: all of `pixels`."""
    sizes = torch.tensor([pixels.shape[-2:]] * len(pixels)) if sizes is None else sizes.cpu()
    bounds = F.pad((sizes // tower.patch_size).prod(-1).cumsum(0, dtype=torch.int32), (1, 0))
    longest = _longest(bounds)
    return dict(cu_seq_lens_q=bounds, cu_seq_lens_k=bounds, max_length_q=longest, max_length_k=longest)


def _longest(bounds: Tensor) -> int:
    return max(LEAST_BOUND, 1 << (int(bounds.diff().max()) - 1).bit_length())


def _on(device: torch.device, values: dict[str, Any]) -> dict[str, Any]:
    """The tensors on `device`, without waiting for it."""

    def send(value: Tensor) -> Tensor:
        return value.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else value.to(device)

    return {name: send(value) if isinstance(value, Tensor) else value for name, value in values.items()}


def attend_at_once(model: nn.Module, device: torch.device) -> None:
    """Let the towers of a model that will be on `device` call attention once for all images, where torch has a kernel
    for it. Call it under the autocast context of training."""
    if device.type != "cuda" or not hasattr(torch.ops.aten, BY_DOCUMENTS.aten):
        return
    autocast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    for tower in towers(model):
        dtype = autocast or next(tower.parameters()).dtype
        if dtype in (torch.float16, torch.bfloat16) and takes_bounds(tower):
            call(tower, "fxtune_tower_flash2")


def call(tower: Any, name: str) -> None:
    """Let a tower that takes_bounds() call the attention of this name in CORES.

    The name is set in the config of a built model: while it is built, transformers looks for a package behind each
    name with `flash`."""
    from transformers import AttentionInterface

    AttentionInterface.register(name, _attention_function(CORES[name][0]))
    set_attention(tower.config, name)


def takes_bounds(tower: Any) -> bool:
    """Whether a tower passes the bounds of images to its attention, if the attention's name contains `flash`, and has
    heads that FlashAttention takes."""
    config = tower.config
    family = config.model_type
    if family != "pixtral" and not family.startswith("qwen"):
        return False
    heads = getattr(config, "num_heads", None) or config.num_attention_heads
    width = getattr(config, "embed_dim", None) or config.hidden_size
    return not getattr(config, "attention_dropout", 0.0) and width // heads % 8 == 0


def attends_at_once(tower: Any) -> bool:
    """Whether attention in a tower takes all images at once."""
    return attention_of(tower.config) in CORES


@functools.cache
def _attention_function(core: Core) -> Callable[..., tuple[Tensor, None]]:
    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Optional[Tensor],
        *,
        cu_seq_lens_q: Tensor,
        max_length_q: int,
        scaling: Optional[float] = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """([1, patches, heads, d], None) from query, key and value [1, heads, patches, d]."""
        dtype = compute_dtype(value)
        q, k, v = (x[0].transpose(0, 1).to(dtype) for x in (query, key, value))
        scale = q.shape[-1] ** -0.5 if scaling is None else scaling
        return core(q, k, v, cu_seq_lens_q, max_length_q, scale).unsqueeze(0), None

    return attention


def observe(model: Any) -> tuple[str, str, bool] | None:
    """What attention in the towers was asked to be, what a small image shows, and whether it acted. None: the model
    has no tower that attends_at_once(), or no image can be tried."""
    names = {attention_of(tower.config) for tower in towers(model) if attends_at_once(tower)}
    if not names or not kind_of(model.config).image_probe(model):
        return None
    backend = CORES[names.pop()][1]
    seen = observe_operators(lambda: kind_of(model.config).image_features(model), {"tower": backend.ran})["tower"]
    layers = len(tower_layers(model))
    return (
        f"the tower's: {backend.what}, once for all images",
        f"{seen.calls} calls in {layers} layers of the tower",
        seen.calls >= layers,
    )
