"""torch's scaled_dot_product_attention. On a GPU in half precision, torch's built-in FlashAttention-2 runs instead and
reads the bounds of documents. In other cases transformers builds a mask. On a CPU, answers that share a prompt run
one by one, by the plain reference of kernels/flash4.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Optional

from torch import Tensor
from torch.nn import functional as F

from fxtune.facts.run import Facts
from fxtune.kernels.flash4 import Options
from fxtune.system.terminal.units import GIB
from fxtune.techniques.attention.backends import flash4
from fxtune.techniques.attention.backends.backend import Backend, Reason, mask_bytes
from fxtune.techniques.attention.packed import document_mask, one_document_a_row
from fxtune.upstream.torch import attention_operator

LARGEST_MASK = GIB
"""The largest mask of packed rows, in bytes, that transformers may build on a GPU."""


def attend(q: Tensor, k: Tensor, v: Tensor, options: Options, dropout: float = 0.0) -> Tensor:
    (rows, length), window, causal = q.shape[:2], options.window, options.causal
    left, right = (window - 1, 0 if causal else window - 1) if window else (-1, -1)
    width = v.shape[-1]
    padded = F.pad(v, (0, q.shape[-1] - width)) if width < q.shape[-1] else v
    flat = [x.flatten(0, 1) for x in (q, k, padded)]
    bounds: tuple[Any, ...] = options.cu_seqlens, options.cu_seqlens, length, length
    if options.cu_seqlens_k is not None:
        # The limit of keys is all of k, because the backward pass leaves out keys beyond the limit.
        bounds = options.cu_seqlens, options.cu_seqlens_k, length, len(flat[1])
    windows = {"window_size_left": left, "window_size_right": right}
    out: Tensor = attention_operator("_flash_attention_forward")(
        *flat, *bounds, dropout, causal, False, scale=options.scale, **windows
    )[0]
    return out[..., :width].unflatten(0, (rows, length))


BY_DOCUMENTS = Backend(
    "sdpa",
    "fxtune_sdpa",
    "FlashAttention-2, built into torch",
    r"^aten::_flash_attention_forward$",
    core=attend,
    shares=True,
    dropout=True,
    recordable=True,
    part_of="sdpa",
)
ON_CPU = Backend(
    "sdpa",
    "fxtune_documents",
    "attention document by document, in plain torch",
    r"^fxtune::flash4$",
    operators=("fxtune.flash4",),
    core=flash4.attend,
    gpu=False,
    half=False,
    head_dim=0,
    shares=True,
    flag="_supports_sdpa",
)
"""Runs documents that share a prompt on a CPU."""


class _Sdpa(Backend):
    def refusals(self, facts: Facts) -> Iterator[Reason]:
        on_gpu, reason = facts.device == "cuda", next(BY_DOCUMENTS.refusals(facts), None)
        if on_gpu and not reason:
            return
        yield from super().refusals(facts)
        if on_gpu and reason and facts.packing and mask_bytes(facts) > LARGEST_MASK:
            yield (
                f"would build a mask of {mask_bytes(facts) / GIB:.1f} GiB for packed rows of {facts.sequence_length} "
                f"tokens, because its kernel for packed documents {reason[0]}",
                "Set model.dtype=bfloat16, shorten data.sequence_length, or use flex",
            )

    def running(self, facts: Facts) -> Backend:
        if facts.shares_prompts and facts.device == "cpu":
            return ON_CPU
        return self if any(BY_DOCUMENTS.refusals(facts)) else BY_DOCUMENTS

    def records(self, facts: Facts) -> bool:
        return self.running(facts).recordable

    def given_mask(self, seen: Tensor) -> Tensor:
        return seen

    def row_mask(self, query: Tensor, cu_seqlens: Tensor, window: int) -> Optional[Tensor]:
        plain = one_document_a_row(len(query), cu_seqlens) and not window
        return None if plain else document_mask(len(query), query.shape[2], cu_seqlens, window)


SDPA = _Sdpa(
    "sdpa",
    "sdpa",
    "scaled_dot_product_attention of torch",
    r"^aten::scaled_dot_product_attention$",
    operators=("aten._scaled_dot_product_flash_attention", "aten._scaled_dot_product_efficient_attention"),
    gpu=False,
    half=False,
    head_dim=0,
    dropout=True,
    flag="_supports_sdpa",
)
