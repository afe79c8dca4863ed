"""Attention by plain operations. They support everything, and store rows x heads x length^2 scores."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fxtune.facts.run import Facts
from fxtune.models.dims import Shape
from fxtune.system.terminal.units import GIB
from fxtune.techniques.attention.backends.backend import Backend, Reason, mask_bytes
from fxtune.techniques.attention.packed import document_mask


class _Eager(Backend):
    def more_refusals(self, facts: Facts) -> Iterator[Reason]:
        # A score takes 8 bytes: in bfloat16 without the mask, in bfloat16 with the mask, and a float32 softmax.
        heads = max((each.heads for each in Shape.of(facts.model).attentions), default=0)
        scores = 8 * heads * mask_bytes(facts)
        if facts.device == "cuda" and facts.memory and scores > facts.memory:
            yield (
                f"stores the scores of each layer and their softmax, {scores / GIB:,.0f} GiB in rows of "
                f"{facts.sequence_length} tokens",
                "Use auto, or shorten data.sequence_length",
            )

    def row_mask(self, query: Tensor, cu_seqlens: Tensor, window: int) -> Tensor:
        return _added(document_mask(len(query), query.shape[2], cu_seqlens, window), query.dtype)

    def given_mask(self, seen: Tensor) -> Tensor:
        return _added(seen, torch.float32)


def _added(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask `seen` as numbers that are added to the scores."""
    return torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)


EAGER = _Eager(
    "eager",
    "eager",
    "plain operations",
    r"^aten::softmax$",
    gpu=False,
    half=False,
    head_dim=0,
    softcap=True,
    dropout=True,
    sinks=True,
    fused=False,
    flag="",
    elsewhere=True,  # a router's softmax
)
