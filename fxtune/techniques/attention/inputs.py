"""The keyword arguments of a forward pass, by which attention keeps packed documents apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fxtune.techniques.attention.packed import OURS, no_mask

if TYPE_CHECKING:
    pass


def model_inputs(
    model: nn.Module, input_ids: torch.Tensor, position_ids: torch.Tensor, cu_seqlens: torch.Tensor
) -> dict[str, Any]:
    """The keyword arguments for one forward pass in training: what Batch holds, under transformers' names.

    Documents are kept apart by `position_ids`, from which transformers builds a mask, or by `cu_seqlens`, for attention that
    takes documents of any length one after the other. `use_cache=False` keeps compiled layers from recompiling on the cache's
    state.
    """
    given: dict[str, Any] = dict(input_ids=input_ids, position_ids=position_ids, use_cache=False)
    attention = str(model.config._attn_implementation)  # type: ignore[union-attr]
    if attention in OURS:
        given["attention_mask"] = no_mask(input_ids)
    elif (
        "flash" not in attention and "/" not in attention
    ):  # a slash: a kernel of the hub, which transformers calls likewise
        return given
    elif torch.are_deterministic_algorithms_enabled():
        given["deterministic"] = True  # transformers hands it to the FlashAttention package
    # A row's length in place of the longest document's: one number for all batches, so compiled code stays.
    longest = input_ids.shape[1]
    given.update(cu_seq_lens_q=cu_seqlens, cu_seq_lens_k=cu_seqlens, max_length_q=longest, max_length_k=longest)
    return given
