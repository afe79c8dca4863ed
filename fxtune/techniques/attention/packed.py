"""Attention over packed rows, registered under fxtune's own names in transformers.

transformers separates packed documents by a mask of [rows, 1, length, length], 4 GiB for one row of 64k tokens, unless
the attention function reads `cu_seqlens`. These do: `fxtune_fa4` (kernels/flash4.py), `fxtune_sdpa` (torch's built-in
FlashAttention-2) and `fxtune_cudnn` (cuDNN's). They take the arguments of transformers' own FlashAttention functions,
so every model that works with those works with these. The names do not contain "flash": for such a name transformers
would look for a kernel on the hub.

A call without `cu_seqlens` (generation with a cache, rows padded on the left) runs torch's attention with the mask
that transformers then builds, or plain operations if scores have a soft cap or sinks.
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
from fxtune.upstream.torch import attention_operator

FLASH4, SDPA, CUDNN = "fxtune_fa4", "fxtune_sdpa", "fxtune_cudnn"
OURS = (FLASH4, SDPA, CUDNN)
CUDNN_STEPS = 8
"""cuDNN prepares a plan for each length. So lengths are padded: between two powers of two there are this many."""

Core = Callable[[Tensor, Tensor, Tensor, Tensor, float, int, float, Optional[Tensor]], Tensor]
"""(q, k, v, cu_seqlens, scale, window, softcap, sinks) -> out; q, k, v and out as [rows, length, heads, d]. See
flash4(), which alone takes sinks."""

_UNTRACED: dict[str, Callable[..., Tensor]] = {}


def register() -> None:
    """Register the names with transformers, once or again. `fxtune_fa4` needs kernels/flash4.py imported."""
    from transformers import AttentionInterface, AttentionMaskInterface

    mask = AttentionMaskInterface()["sdpa"]
    for name, core in ((FLASH4, _by_flash4), (SDPA, _by_torch), (CUDNN, _by_cudnn)):
        AttentionInterface.register(name, _attention_function(core))
        AttentionMaskInterface.register(name, mask)  # only for calls without `no_mask`
    # If it were traced, it would be compiled for each batch's lengths. disable() takes a second: not at import.
    _UNTRACED["cudnn"] = torch.compiler.disable(_cudnn_documents)


def no_mask(input_ids: Tensor) -> Tensor:
    """The attention mask to pass with `cu_seqlens`: four dimensions and no elements. transformers passes it on as it
    is; without one it would look for documents in `position_ids`, for which the host waits, and build a mask.
    """
    return input_ids.new_empty((len(input_ids), 1, 1, 0), dtype=torch.bool)


def one_document_a_row(rows: int, cu_seqlens: Tensor) -> bool:
    """Whether each row is one document: one begins with each row."""
    return len(cu_seqlens) == rows + 1


@functools.cache
def _attention_function(core: Core) -> Callable[..., tuple[Tensor, None]]:
    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Optional[Tensor], **options: Any
    ) -> tuple[Tensor, None]:
        return _attend(core, module, query, key, value, attention_mask, **options), None

    return attention


def _attend(
    core: Core,
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
    s_aux: Optional[Tensor] = None,
    position_bias: Optional[Tensor] = None,
    **_: Any,
) -> Tensor:
    """[rows, length, heads, d] from query [rows, heads, length, d], key and value [rows, kv_heads, length, d]."""
    if position_bias is not None or (s_aux is not None and core is not _by_flash4):
        raise _unsupported(module, "adds sinks or a position bias to its scores, and this kernel does not")
    dtype = compute_dtype(value)
    query, key, value = (x.to(dtype) for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if cu_seq_lens_q is None:
        if attention_mask is not None and attention_mask.numel() == 0:
            why = "does not pass the documents' bounds to its attention, so documents would see each other"
            raise _unsupported(module, why)
        return _masked(module, query, key, value, attention_mask, dropout, scale, softcap, is_causal, s_aux)
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise _unsupported(module, "is not causal, and this kernel is")
    if dropout:
        raise _unsupported(module, f"asks for dropout of {dropout}, and this kernel has no dropout")
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    window = sliding_window if sliding_window and sliding_window < query.shape[1] else 0
    return core(query, key, value, cu_seq_lens_q, scale, window, softcap or 0.0, s_aux)


def _unsupported(module: nn.Module, why: str) -> ConfigError:
    return ConfigError(f"techniques.attention.backend: {type(module).__name__} {why}. Set it to eager.")


def _by_flash4(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: Optional[Tensor] = None,
) -> Tensor:
    rows, length = q.shape[:2]
    if sinks is not None and q.dtype != torch.float32:  # the package takes sinks in bfloat16 only, also over float16
        sinks = sinks.to(torch.bfloat16)
    flash4: Callable[..., tuple[Tensor, ...]] = torch.ops.fxtune.flash4
    if one_document_a_row(rows, cu_seqlens):
        return flash4(q, k, v, None, length, scale, window, softcap, sinks)[0]
    # In training [heads, length] is a view of [length, heads], so flatten() copies nothing.
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    return flash4(*flat, cu_seqlens, length, scale, window, softcap, sinks)[0].unflatten(0, (rows, length))


def _by_torch(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, window: int, softcap: float, _: Any = None
) -> Tensor:
    rows, length = q.shape[:2]
    left, right = (window - 1, 0) if window else (-1, -1)
    width = v.shape[-1]
    padded = F.pad(v, (0, q.shape[-1] - width)) if width < q.shape[-1] else v
    flat = [x.flatten(0, 1) for x in (q, k, padded)]
    bounds = (cu_seqlens, cu_seqlens, length, length)
    windows = {"window_size_left": left, "window_size_right": right}
    out: Tensor = attention_operator("_flash_attention_forward")(
        *flat, *bounds, 0.0, True, False, scale=scale, **windows
    )[0]
    return out[..., :width].unflatten(0, (rows, length))


def _by_cudnn(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, window: int, softcap: float, _: Any = None
) -> Tensor:
    if one_document_a_row(len(q), cu_seqlens):
        return _cudnn_rows(q, k, v, scale)
    return _UNTRACED["cudnn"](q, k, v, cu_seqlens, scale)


def _cudnn_rows(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    out: Tensor = attention_operator("_scaled_dot_product_cudnn_attention")(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), None, True, 0.0, True, False, scale=scale
    )[0]
    return out.transpose(1, 2)


def _cudnn_documents(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
    """One call for each document: torch disables its call for all documents together, because its backward pass uses
    wrong addresses for the sums of each softmax (run_cudnn_SDP_fprop_nestedtensor of aten/.../cudnn/MHA.cpp).

    Padding follows a document, so causal attention does not read it, and its results are cut off.
    """
    lengths = [length for length in cu_seqlens.diff().tolist() if length]  # the host waits here
    parts = []
    for document in zip(*(x.flatten(0, 1).split(lengths) for x in (q, k, v)), strict=True):
        length = len(document[0])
        padding = cudnn_length(length) - length
        qd, kd, vd = (F.pad(x, (0, 0, 0, 0, 0, padding)).unsqueeze(0) for x in document)
        parts.append(_cudnn_rows(qd, kd, vd, scale)[0, :length])
    return torch.cat(parts).unflatten(0, q.shape[:2])


def cudnn_length(length: int) -> int:
    """`length` rounded up to a multiple of 64 or, if larger, of 1/CUDNN_STEPS of the power of two below it."""
    step = max(64, (1 << (length - 1).bit_length()) // (2 * CUDNN_STEPS))
    return -(-length // step) * step


def _masked(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Optional[Tensor],
    dropout: float,
    scale: float,
    softcap: Optional[float],
    is_causal: Optional[bool],
    sinks: Optional[Tensor],
) -> Tensor:
    """A call outside training. `mask`: boolean, true where a token attends; None: is_causal decides."""
    if not softcap and sinks is None:
        from transformers import AttentionInterface

        options: dict[str, Any] = {"dropout": dropout, "scaling": scale, "is_causal": is_causal}
        out: Tensor = AttentionInterface()["sdpa"](module, query, key, value, mask, **options)[0]
        return out
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
