"""The keyword arguments of a forward pass over packed documents."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fxtune.techniques.attention.packed import OURS, no_mask


def model_inputs(
    model: nn.Module, input_ids: torch.Tensor, position_ids: torch.Tensor, cu_seqlens: torch.Tensor
) -> dict[str, Any]:
    """The tensors of a Batch as keyword arguments for a forward pass in training, under transformers' names.

    Documents are separated by `position_ids`, from which transformers builds a mask, or by `cu_seqlens` for attention
    that takes documents of any length. `use_cache=False`: compiled layers would be compiled again for a cache's state.
    """
    given: dict[str, Any] = dict(input_ids=input_ids, position_ids=position_ids, use_cache=False)
    attention = str(model.config._attn_implementation)  # type: ignore[union-attr]
    if attention in OURS:
        given["attention_mask"] = no_mask(input_ids)
    elif "flash" not in attention and "/" not in attention:  # a slash: a kernel of the hub, called like FlashAttention
        return given
    elif torch.are_deterministic_algorithms_enabled():
        given["deterministic"] = True  # transformers passes it to the FlashAttention package
    # The row's length and not the longest document's: it is the same in all batches, so nothing is compiled again.
    longest = input_ids.shape[1]
    given.update(cu_seq_lens_q=cu_seqlens, cu_seq_lens_k=cu_seqlens, max_length_q=longest, max_length_k=longest)
    return given
