"""Vision encoders: the host computes some arguments, and attention takes all images in one call. No number changes.

- The host computes the bounds of images and the positions of patches, so it does not wait for the device
  (models/kinds/image_decoder/host_arguments.py). The results are copied to the device.
- Unless the attention's name contains `flash`, transformers waits for the lengths, splits queries, keys and values by
  image, and calls attention once for each image or window. That makes thousands of calls in a pass. Here one call of
  FlashAttention takes the bounds.

Other vision encoders take images of one size as a batch. torch computes such a batch by FlashAttention, without a
mask.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Optional

import torch
from torch import Tensor, nn

from fxtune.kernels import flash4 as kernel
from fxtune.kernels.autocast import compute_dtype
from fxtune.models.kinds.image_decoder.host_arguments import pixtral_bounds, qwen_arguments, takes_bounds
from fxtune.models.kinds.image_decoder.parts import encoder_layers, vision_encoders
from fxtune.models.kinds.known import images_of
from fxtune.system.process.profiler import observe_operators
from fxtune.techniques.attention.backends.backend import Backend
from fxtune.techniques.attention.backends.flash4 import FLASH4
from fxtune.techniques.attention.backends.sdpa import BY_DOCUMENTS
from fxtune.techniques.attention.inputs import OF_DOCUMENTS
from fxtune.upstream.torch import attention_operator
from fxtune.upstream.transformers import attention_of, set_attention

Core = Callable[[Tensor, Tensor, Tensor, Tensor, int, float], Tensor]
"""(q, k, v, bounds, upper limit of an image's patches, scale) -> out. q, k, v and out are [patches, heads, d]."""


def flash2(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, scale: float) -> Tensor:
    return attention_operator("_flash_attention_forward")(
        q, k, v, bounds, bounds, longest, longest, 0.0, False, False, scale=scale
    )[0]


def flash4(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, scale: float) -> Tensor:
    """Attention by FlashAttention-4. On a CPU plain torch computes it image by image."""
    return kernel.flash4(q, k, v, bounds, longest, scale, 0, 0.0, causal=False)[0]


CORES: dict[str, tuple[Core, Backend]] = {
    "fxtune_tower_flash2": (flash2, BY_DOCUMENTS),
    "fxtune_tower_flash4": (flash4, FLASH4),
}
"""Name in transformers' registry -> (core, backend with the same operator)."""


def prepare(model: nn.Module) -> None:
    """Register hooks on the vision encoders of a model. The hooks add the arguments that the host computes, and drop
    the bounds of text documents, which some families pass to the vision encoder."""

    def arguments(encoder: Any, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        named = {name: value for name, value in named.items() if name not in OF_DOCUMENTS}
        if (grid := named.get("grid_thw")) is not None:
            places = qwen_arguments(encoder, grid)
            # transformers reads the bounds on the host when it splits by image.
            on_host = () if attends_at_once(encoder) else ("cu_seqlens", "cu_window_seqlens")
            sent = {name: value for name, value in places.items() if name not in on_host}
            named = {**places, **_on(given[0].device, sent), **named}
        elif attends_at_once(encoder):
            named |= _on(given[0].device, pixtral_bounds(encoder, given[0], named.get("image_sizes")))
        return given, named

    for encoder in vision_encoders(model):
        encoder.register_forward_pre_hook(arguments, with_kwargs=True)


def _on(device: torch.device, values: dict[str, Any]) -> dict[str, Any]:
    """`values` with tensors copied to `device`. The host does not wait for the copies."""

    def send(value: Tensor) -> Tensor:
        return value.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else value.to(device)

    return {name: send(value) if isinstance(value, Tensor) else value for name, value in values.items()}


def attend_at_once(model: nn.Module, device: torch.device) -> None:
    """Let the vision encoders of `model` attend to all images in one call. `device`: where the model will be.
    Call this function under training's autocast."""
    if device.type != "cuda":
        return
    autocast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    for encoder in vision_encoders(model):
        dtype = autocast or next(encoder.parameters()).dtype
        if dtype in (torch.float16, torch.bfloat16) and takes_bounds(encoder):
            call(encoder, "fxtune_tower_flash2")


def call(encoder: Any, name: str) -> None:
    """Let a vision encoder that takes_bounds() use the attention `name` of CORES.

    Call this function on a built model: while transformers builds a model, it looks for a package for each attention
    with `flash` in its name."""
    from transformers import AttentionInterface

    AttentionInterface.register(name, _attention_function(CORES[name][0]))
    set_attention(encoder.config, name)


def attends_at_once(encoder: Any) -> bool:
    """Whether attention in a vision encoder takes all images at once."""
    return attention_of(encoder.config) in CORES


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
        """Returns ([1, patches, heads, d], None) for query, key and value [1, heads, patches, d]."""
        dtype = compute_dtype(value)
        q, k, v = (x[0].transpose(0, 1).to(dtype) for x in (query, key, value))
        scale = q.shape[-1] ** -0.5 if scaling is None else scaling
        return core(q, k, v, cu_seq_lens_q, max_length_q, scale).unsqueeze(0), None

    return attention


def observe(model: Any) -> tuple[str, str, bool] | None:
    """Run a small image. Returns the attention that the vision encoders should use, the observed calls, and whether
    there was a call for each layer. None if no vision encoder attends_at_once(), or no image can be tried."""
    names = {attention_of(encoder.config) for encoder in vision_encoders(model) if attends_at_once(encoder)}
    if not names or not images_of(model.config).probe(model):
        return None
    backend = CORES[names.pop()][1]
    seen = observe_operators(lambda: images_of(model.config).features(model), {"attention": backend.ran})["attention"]
    layers = len(encoder_layers(model))
    return (
        f"the vision encoder's: {backend.what}, once for all images",
        f"{seen.calls} calls in {layers} layers of the vision encoder",
        seen.calls >= layers,
    )
