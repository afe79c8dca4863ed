"""cuDNN's attention, in torch. It runs packed rows document by document, so `auto` skips it for packed rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from fxtune.facts.run import Facts
from fxtune.kernels.flash4 import Options
from fxtune.models.dims import Shape
from fxtune.techniques.attention.backends.backend import Backend, Reason
from fxtune.techniques.attention.packed import one_document_a_row
from fxtune.upstream.torch import attention_operator

STEPS = 8
"""cuDNN prepares a plan for each length. So documents are padded to one of this many lengths between two powers of
two."""
_UNTRACED: dict[str, Callable[..., Tensor]] = {}


class _Cudnn(Backend):
    def more_refusals(self, facts: Facts) -> Iterator[Reason]:
        compiler = facts.techniques.compile
        if facts.packing and compiler.enabled and compiler.fullgraph:
            yield (
                "runs packed rows document by document, which cannot be one compiled graph",
                "Set techniques.compile.fullgraph=false, or use flash4 or sdpa",
            )
        if any(each.width != each.value_width for each in Shape.of(facts.model).attentions):
            yield "needs values as wide as keys", "Use flash4, or auto"

    def why_passed_over(self, facts: Facts) -> str | None:
        return "runs packed rows document by document" if facts.packing else super().why_passed_over(facts)

    def records(self, facts: Facts) -> bool:
        return not facts.packing

    def prepare(self) -> None:
        super().prepare()
        # A traced _documents() would be compiled for each batch's lengths. disable() takes a second, too long for
        # import.
        _UNTRACED["documents"] = torch.compiler.disable(_documents)


def attend(q: Tensor, k: Tensor, v: Tensor, options: Options, _: float = 0.0) -> Tensor:
    if one_document_a_row(len(q), options.cu_seqlens):
        return _rows(q, k, v, options.scale)
    return _UNTRACED["documents"](q, k, v, options.cu_seqlens, options.scale)


def _rows(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    out: Tensor = attention_operator("_scaled_dot_product_cudnn_attention")(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), None, True, 0.0, True, False, scale=scale
    )[0]
    return out.transpose(1, 2)


def _documents(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
    """Attention with one call for each document. torch has a call for all documents together, but disables it: its
    backward pass reads softmax sums at wrong addresses (run_cudnn_SDP_fprop_nestedtensor of aten/.../cudnn/MHA.cpp).

    Padding follows a document, so causal attention does not read it. The results of padding are cut off.
    """
    lengths = [length for length in cu_seqlens.diff().tolist() if length]  # the host waits here
    parts = []
    for document in zip(*(x.flatten(0, 1).split(lengths) for x in (q, k, v)), strict=True):
        length = len(document[0])
        padding = padded_length(length) - length
        qd, kd, vd = (F.pad(x, (0, 0, 0, 0, 0, padding)).unsqueeze(0) for x in document)
        parts.append(_rows(qd, kd, vd, scale)[0, :length])
    return torch.cat(parts).unflatten(0, q.shape[:2])


def padded_length(length: int) -> int:
    """`length` rounded up to a multiple of a step. The step is 1/STEPS of the largest power of two below `length`,
    but at least 64."""
    step = max(64, (1 << (length - 1).bit_length()) // (2 * STEPS))
    return -(-length // step) * step


CUDNN = _Cudnn(
    "cudnn",
    "fxtune_cudnn",
    "cuDNN's attention",
    r"^aten::_scaled_dot_product_cudnn_attention$",
    operators=("aten._scaled_dot_product_cudnn_attention",),
    core=attend,
    head_dim=128,
    window=False,
    bidirectional=False,
    deterministic=False,
    part_of="sdpa",
)
