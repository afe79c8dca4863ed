"""The keyword arguments of a forward pass over packed documents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fxtune.techniques.attention.backends.registry import called
from fxtune.techniques.attention.packed import no_mask
from fxtune.upstream.transformers import attention_of


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
) -> dict[str, Any]:
    """The tensors of a Batch as keyword arguments for a forward pass in training, under transformers' names.

    Documents are separated by `position_ids`, from which transformers builds a mask, or by `cu_seqlens` for attention
    that takes documents of any length. `use_cache=False`: compiled layers would be compiled again for a cache's state.

    `pieces`: into how many pieces each row is divided (Batch.pieces). The tensors are one piece; the other ranks
    of the process group `group` have the other pieces. `keys`: only for backends that take them (Backend.shares).
    """
    inputs: dict[str, Any] = dict(input_ids=input_ids, position_ids=position_ids, use_cache=False)
    backend = called(attention_of(model.config))
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
        assert backend.shares, f"{backend.name} would ignore the keys of other documents"
        inputs.update(cu_seq_lens_k=keys.cu_seqlens, key_index=keys.index, key_copies=keys.copies)
    return inputs
