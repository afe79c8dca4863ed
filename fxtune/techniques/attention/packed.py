"""Attention over packed rows, registered under fxtune's own names in transformers.

transformers separates packed documents by a mask of [rows, 1, length, length], 4 GiB for one row of 64k tokens, unless
the attention function reads `cu_seqlens`. The backends with a `core` read it (backends/flash4.py, sdpa.py and
cudnn.py). Their functions take the arguments of transformers' own FlashAttention functions, so they work with every
model that works with FlashAttention. The registered names do not contain "flash": for a name with "flash",
transformers would look for a kernel on the hub.

With `key_index` a document also attends to tokens of another document: answers share a prompt that their row has
once (data/batches/shared_prompts.py). Keys and values are gathered, so that all keys of a document follow one another,
and the gathered keys have their own bounds. The last query of a document attends to all its keys. With few key heads
the copies cost little.

A call without `cu_seqlens` (generation with a cache, rows padded on the left) gets a mask from transformers and runs
torch's attention. If scores have a soft cap or sinks, the call runs plain operations instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxtune.errors import ConfigError
from fxtune.kernels.autocast import compute_dtype
from fxtune.kernels.flash4 import Options
from fxtune.kernels.shared_keys import select_keys

Core = Callable[[Tensor, Tensor, Tensor, Options, float], Tensor]
"""(q, k, v, options with `cu_seqlens`, dropout) -> out. q, k, v and out are [rows, length, heads, d]. With
`cu_seqlens_k`, k and v are [1, keys, heads, d]."""


def register(implementation: str, core: Core, sinks: bool = False, dropout: bool = False) -> None:
    """Register `core` with transformers under this name. May be called again. `sinks`, `dropout`: whether `core` takes
    sinks and dropout."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(implementation, _attention_function(core, sinks, dropout))
    AttentionMaskInterface.register(implementation, AttentionMaskInterface()["sdpa"])  # if no_mask() is not passed


def no_mask(input_ids: Tensor) -> Tensor:
    """The attention mask to pass with `cu_seqlens`: four dimensions and no elements. transformers passes it on
    unchanged. Without a mask transformers would look for documents in `position_ids`, for which the host waits, and
    build a mask."""
    return input_ids.new_empty((len(input_ids), 1, 1, 0), dtype=torch.bool)


def document_mask(
    rows: int, length: int, cu_seqlens: Tensor, window: int, blocks: Tensor | None = None, causal: bool = True
) -> Tensor:
    """The mask bool [rows, 1, length, length]: a token attends to tokens of its document up to itself, within `window`
    (0: no limit). Without `causal` it attends to all tokens of its document, within `window` to both sides.

    `blocks`: int64 [rows, length]. Tokens with the same positive number see each other in both directions.
    """
    at = torch.arange(rows * length, device=cu_seqlens.device)
    document = torch.searchsorted(cu_seqlens[1:].long(), at, right=True).view(rows, length)
    back = at[:length, None] - at[None, :length]
    back = back if causal else back.abs()
    seen = (back >= 0).expand(rows, -1, -1)
    if blocks is not None:
        seen = seen | (blocks[:, :, None] == blocks[:, None, :]) & (blocks > 0)[:, :, None]
    return ((document[:, :, None] == document[:, None, :]) & seen & (back < (window or length))).unsqueeze(1)


def one_document_a_row(rows: int, cu_seqlens: Tensor | None) -> bool:
    """Whether each row is one document: the numbers of documents and rows are equal."""
    return cu_seqlens is not None and len(cu_seqlens) == rows + 1


@functools.cache
def _attention_function(
    core: Core, takes_sinks: bool, takes_dropout: bool = False
) -> Callable[..., tuple[Tensor, None]]:
    from transformers import AttentionInterface

    sdpa = AttentionInterface()["sdpa"]  # not in attention(): torch 2.11 cannot compile this import

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Optional[Tensor],
        dropout: float = 0.0,
        scaling: Optional[float] = None,
        sliding_window: Optional[int] = None,
        softcap: Optional[float] = None,
        is_causal: Optional[bool] = None,
        cu_seq_lens_q: Optional[Tensor] = None,
        cu_seq_lens_k: Optional[Tensor] = None,
        key_index: Optional[Tensor] = None,
        key_copies: Optional[Tensor] = None,
        s_aux: Optional[Tensor] = None,
        position_bias: Optional[Tensor] = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Returns ([rows, length, heads, d], None) for query [rows, heads, length, d], key and value [rows, kv_heads,
        length, d]."""
        if position_bias is not None or (s_aux is not None and not takes_sinks):
            raise _unsupported(module, "adds sinks or a position bias to its scores, and this kernel does not")
        dtype = compute_dtype(value)
        query, key, value = (x.to(dtype) for x in (query, key, value))
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        if cu_seq_lens_q is None:  # a call outside training, or with images whose tokens see each other
            if attention_mask is not None and attention_mask.numel() == 0:
                why = "does not pass the documents' bounds to its attention, so documents would see each other"
                raise _unsupported(module, why)
            if softcap or s_aux is not None:
                return _plain(query, key, value, attention_mask, dropout, scale, softcap, s_aux), None
            options: dict[str, Any] = {"dropout": dropout, "scaling": scale, "is_causal": is_causal}
            return sdpa(module, query, key, value, attention_mask, **options)[0], None
        if dropout and not takes_dropout:
            raise _unsupported(module, f"asks for dropout of {dropout}, and this kernel has no dropout")
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        window = sliding_window if sliding_window and sliding_window < query.shape[1] else 0
        bounds = None
        if key_index is not None:
            bounds = cu_seq_lens_k
            key, value = (select_keys(x.flatten(0, 1), key_index, key_copies).unsqueeze(0) for x in (key, value))
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        given = Options(cu_seq_lens_q, query.shape[1], scale, window, softcap or 0.0, s_aux, bounds, causal)
        return core(query, key, value, given, dropout), None

    return attention


def _unsupported(module: nn.Module, why: str) -> ConfigError:
    return ConfigError(f"techniques.attention.backend: {type(module).__name__} {why}. Set it to eager.")


def _plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Optional[Tensor],
    dropout: float,
    scale: float,
    softcap: Optional[float],
    sinks: Optional[Tensor],
) -> Tensor:
    """Attention in plain operations. `mask`: boolean, true where a token attends; without it attention is causal."""
    groups = query.shape[1] // key.shape[1]
    if mask is None and query.shape[2] > 1:
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    scores = (query @ key.repeat_interleave(groups, 1).mT).float() * scale
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(*scores.shape[:-1], 1)], -1)
    weights = F.dropout(scores.softmax(-1)[..., : key.shape[2]].to(query.dtype), dropout)
    return (weights @ value.repeat_interleave(groups, 1)).transpose(1, 2)
