"""Vision encoders: arguments that the host computes, and attention to all images in one call.

Qwen's and Pixtral's vision encoders take the patches of all images in one list and attend within each image, or within
windows of an image. Two changes save time there, and change no number:

- The sizes of the images determine the bounds of images and windows, and the positions of patches. transformers
  computes them on the device, and the host waits for the device several times. prepare() computes them on the host,
  with transformers' functions, from sizes that are still on the host (ON_HOST of data/batches/batch.py). It copies
  the results to the device.
- Unless the attention's name contains `flash`, transformers waits for the lengths, splits queries, keys and values by
  image, and calls attention once for each image or window: thousands of calls a pass. Here one call of FlashAttention
  takes the bounds.

Other vision encoders take images of one size as a batch, for which torch uses FlashAttention without a mask.
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
from fxtune.models.kinds.known import images_of
from fxtune.models.structure import tower_layers, towers
from fxtune.system.process.profiler import observe_operators
from fxtune.techniques.attention.backends.backend import Backend
from fxtune.techniques.attention.backends.flash4 import FLASH4
from fxtune.techniques.attention.backends.sdpa import BY_DOCUMENTS
from fxtune.techniques.attention.inputs import OF_DOCUMENTS
from fxtune.upstream.torch import attention_operator
from fxtune.upstream.transformers import attention_of, set_attention

Core = Callable[[Tensor, Tensor, Tensor, Tensor, int, float], Tensor]
"""(q, k, v, bounds, an upper bound of the lengths, scale) -> out. q, k, v and out are [patches, heads, d]."""
LEAST_BOUND = 64
"""The smallest value that is passed as the upper bound of the lengths of images or windows."""


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
"""Name in transformers' registry -> (core, backend with the same operator)."""


def prepare(model: nn.Module) -> None:
    """Register hooks that give the vision encoders of a model arguments computed on the host, and drop the bounds of
    text documents, which some families pass to the vision encoder."""

    def arguments(tower: Any, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        named = {name: value for name, value in named.items() if name not in OF_DOCUMENTS}
        if (grid := named.get("grid_thw")) is not None:
            places = places_of(tower, grid)
            # To split by image, transformers reads the bounds on the host.
            on_host = () if attends_at_once(tower) else ("cu_seqlens", "cu_window_seqlens")
            sent = {name: value for name, value in places.items() if name not in on_host}
            named = {**places, **_on(given[0].device, sent), **named}
        elif attends_at_once(tower):
            named |= _on(given[0].device, _bounds(tower, given[0], named.get("image_sizes")))
        return given, named

    for tower in towers(model):
        tower.register_forward_pre_hook(arguments, with_kwargs=True)


def places_of(tower: Any, grid: Tensor) -> dict[str, Any]:
    """Arguments by name that a Qwen vision encoder would compute from `grid_thw` [images, 3], computed on the host
    (transformers.vision_utils). Upper bounds of lengths are powers of two, because compiled code and kernels may be
    specialized for their values."""
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
    """The bounds of images in Pixtral's vision encoder, as arguments of attention by name. transformers 5.17 passes no
    bounds, 5.24 its own. `sizes` [images, 2]: heights and widths in pixels; None: images have the size of `pixels`."""
    sizes = torch.tensor([pixels.shape[-2:]] * len(pixels)) if sizes is None else sizes.cpu()
    bounds = F.pad((sizes // tower.patch_size).prod(-1).cumsum(0, dtype=torch.int32), (1, 0))
    longest = _longest(bounds)
    return dict(cu_seq_lens_q=bounds, cu_seq_lens_k=bounds, max_length_q=longest, max_length_k=longest)


def _longest(bounds: Tensor) -> int:
    return max(LEAST_BOUND, 1 << (int(bounds.diff().max()) - 1).bit_length())


def _on(device: torch.device, values: dict[str, Any]) -> dict[str, Any]:
    """`values` with tensors copied to `device`. The host does not wait for the copies."""

    def send(value: Tensor) -> Tensor:
        return value.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else value.to(device)

    return {name: send(value) if isinstance(value, Tensor) else value for name, value in values.items()}


def attend_at_once(model: nn.Module, device: torch.device) -> None:
    """Let the vision encoders of a model that will be on `device` attend to all images in one call.
    Call this function under the autocast context of training."""
    if device.type != "cuda":
        return
    autocast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    for tower in towers(model):
        dtype = autocast or next(tower.parameters()).dtype
        if dtype in (torch.float16, torch.bfloat16) and takes_bounds(tower):
            call(tower, "fxtune_tower_flash2")


def call(tower: Any, name: str) -> None:
    """Let a vision encoder that takes_bounds() use the attention `name` of CORES.

    Call this function on a built model: while transformers builds a model, it looks for a package for each attention
    with `flash` in its name."""
    from transformers import AttentionInterface

    AttentionInterface.register(name, _attention_function(CORES[name][0]))
    set_attention(tower.config, name)


def takes_bounds(tower: Any) -> bool:
    """Whether a vision encoder passes the bounds of images to attention with `flash` in its name, and FlashAttention
    supports the size of its heads."""
    config = tower.config
    family = config.model_type
    if family != "pixtral" and not family.startswith("qwen"):
        return False
    heads = getattr(config, "num_heads", None) or config.num_attention_heads
    width = getattr(config, "embed_dim", None) or config.hidden_size
    return not getattr(config, "attention_dropout", 0.0) and width // heads % 8 == 0


def attends_at_once(tower: Any) -> bool:
    """Whether attention in a vision encoder takes all images at once."""
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
    """(attention that the vision encoders should use, calls that a small image made, whether each layer made one).
    None: no vision encoder attends_at_once(), or no image can be tried."""
    names = {attention_of(tower.config) for tower in towers(model) if attends_at_once(tower)}
    if not names or not images_of(model.config).probe(model):
        return None
    backend = CORES[names.pop()][1]
    seen = observe_operators(lambda: images_of(model.config).features(model), {"tower": backend.ran})["tower"]
    layers = len(tower_layers(model))
    return (
        f"the vision encoder's: {backend.what}, once for all images",
        f"{seen.calls} calls in {layers} layers of the vision encoder",
        seen.calls >= layers,
    )
