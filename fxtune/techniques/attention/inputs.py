"""The keyword arguments of a forward pass over packed documents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fxtune.errors import ConfigError
from fxtune.models.kinds.known import kind_of
from fxtune.models.structure import base_dtype, image_arguments
from fxtune.techniques.attention.backends.registry import called
from fxtune.techniques.attention.linear import BOUNDS, CHUNKS, documents_of
from fxtune.techniques.attention.packed import document_mask, no_mask
from fxtune.upstream.transformers import attention_of

OF_DOCUMENTS = (
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "key_index",
    "key_copies",
    "max_length_q",
    "max_length_k",
    "deterministic",
    "context_group",
    "context_ranks",
    BOUNDS,
    CHUNKS,
)
"""The keys of model_inputs()'s result that are meant for the decoder's layers. transformers passes them to some
vision encoders, too."""


@dataclass(frozen=True)
class KeyBounds:
    """Keys and values that have other bounds than queries: `cu_seqlens_k`, `key_index` and `key_copies` of a Batch."""

    cu_seqlens: torch.Tensor
    index: torch.Tensor
    copies: torch.Tensor


def model_inputs(
    model: nn.Module,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    cu_seqlens: torch.Tensor,
    pieces: int = 1,
    group: str = "",
    keys: KeyBounds | None = None,
    images: dict[str, torch.Tensor] | None = None,
    rope_positions: torch.Tensor | None = None,
) -> dict[str, Any]:
    """The tensors of a Batch as keyword arguments for a forward pass in training, under transformers' names.

    Documents are separated by `position_ids`, from which transformers builds a mask, or by `cu_seqlens` for attention
    that takes documents of any length. `use_cache=False`: compiled layers would be compiled again for a cache's state.

    `pieces`: into how many pieces each row is divided (Batch.pieces). The tensors are one piece; the other ranks
    of the process group `group` have the other pieces. `keys`: only for backends that take them (Backend.shares).

    `images`, `rope_positions`: as in a Batch. With images the result can be given to the model's body() or to the
    whole model. Without images it can be given to its backbone(), too. Raises ConfigError for images that this
    attention cannot take.
    """
    config: Any = model.config
    kind, backend = kind_of(config), called(attention_of(config))
    known = kind.images
    assert keys is None or backend.shares, f"{backend.name} would ignore the keys of other documents"
    positions = known.positions(config, position_ids, rope_positions) if known else position_ids
    positions = positions + first if (first := kind.first_position(config)) else positions
    inputs: dict[str, Any] = dict(input_ids=input_ids, position_ids=positions, use_cache=False)
    if getattr(model, "recurrent_operators", None):  # set by recurrent.separate()
        inputs.update(documents_of(cu_seqlens, input_ids.numel()))
    if images is not None and known is not None:
        assert pieces == 1, "settle/images.py refuses rows with images that are cut"
        inputs.update(image_arguments(model, images))
        if (blocks := known.blocks(config, input_ids)) is not None:
            assert keys is None, "settle/images.py refuses shared prompts with such images"
            rows, length = input_ids.shape
            window = getattr(config.get_text_config(), "sliding_window", None) or 0
            masks = {
                layers: backend.given_mask(document_mask(rows, length, cu_seqlens, reach, blocks))
                for layers, reach in (("full_attention", 0), ("sliding_attention", window))
            }
            if any(mask is None for mask in masks.values()):
                raise ConfigError(
                    f"techniques.attention.backend: the tokens of an image in {config.model_type} see each other, and "
                    f"{backend.name} takes no mask for it. Set it to sdpa or eager."
                )
            inputs["attention_mask"] = masks
            return inputs
    if kind.bidirectional and not backend.given_bounds:
        assert pieces == 1, "an objective that reads whole documents refuses rows that are cut"
        inputs["attention_mask"] = kind.masks(config, lambda window: _mask(model, input_ids, cu_seqlens, window))
    if not (backend.given_bounds or pieces > 1):
        return inputs
    if backend.core is not None or pieces > 1:  # context.py makes the masks of whole rows
        inputs["attention_mask"] = no_mask(input_ids)
    if pieces > 1:
        inputs.update(context_group=group, context_ranks=pieces)
    if backend.core is None and backend.given_bounds and torch.are_deterministic_algorithms_enabled():
        inputs["deterministic"] = True  # transformers passes it to the FlashAttention package
    # The row's length and not the longest document's: it is the same in all batches, so nothing is compiled again.
    longest = pieces * input_ids.shape[1]
    inputs.update(cu_seq_lens_q=cu_seqlens, cu_seq_lens_k=cu_seqlens, max_length_q=longest, max_length_k=longest)
    if keys is not None:
        inputs.update(cu_seq_lens_k=keys.cu_seqlens, key_index=keys.index, key_copies=keys.copies)
    return inputs


def _mask(model: nn.Module, input_ids: torch.Tensor, cu_seqlens: torch.Tensor, window: int) -> torch.Tensor:
    """The mask with which the tokens of a document see each other, as the attention of `model` takes it."""
    rows, length = input_ids.shape
    seen = document_mask(rows, length, cu_seqlens, window, causal=False)
    mask = called(attention_of(model.config)).given_mask(seen)
    assert mask is not None, "backends without bounds and masks are refused for encoders"
    return mask.to(base_dtype(model)) if mask.is_floating_point() else mask
