"""Cross-entropy of a linear head without its logits: chunk by chunk, loss and gradient in one pass.

The logits of 64k tokens over 128k words are 16.8 GB in bfloat16, and plain autograd keeps them, their float32 copy and their
gradient. But the gradient of a summed cross-entropy is known as soon as the logits are, softmax - onehot, up to a factor
that is one number. So each chunk of rows is taken from hidden states to gradients at once, in one buffer that the next
chunk overwrites:

    logits = h W^T                          one matmul, in the head's dtype
    loss, logits <- softmax - onehot        one kernel in float32, in place (cross_entropy_triton.py; plain torch on a CPU)
    dh = logits W,   dW += logits^T h       two matmuls; no dW where the head is frozen, neither of them in evaluation

The backward pass multiplies by that one number. Memory: the buffer, dh, and dW in float32 where it is wanted. Time: the two or
three matmuls that nothing can spare, and the kernel's three passes over the buffer, 5 % of them at d = 4096.
Liger's kernel of the same idea (arXiv 2410.10989) takes small chunks (256 rows for Llama 3 at 8k tokens, which no matmul likes)
and reads the number of its rows back from the device, which stops the host.

An autograd.Function and not a torch.library operator: it runs outside of what is compiled, its gradients are by-products of
its forward pass, and it writes them in place; an operator would have to return them as outputs.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from fxtune.kernels.fp8 import dequantize_weight, quantize_rows, scaled_mm
from fxtune.kernels.matmul import CUBLAS, mm

BUFFER = 2**30
"""Bytes of one chunk's logits, unless told otherwise: 4,096 rows of 128k words in bfloat16."""
IGNORED = -100
"""The label of a row without one: torch.nn.functional.cross_entropy's ignore_index."""
PART = 64 * 2**20
"""Numbers that are taken up to float32 at once where gradients are scaled or added up."""


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    scale: float = 1.0,
    cap: float = 0.0,
    chunk_rows: int | None = None,
    fp8_scales: torch.Tensor | None = None,
    by: str = CUBLAS,
) -> torch.Tensor:
    """Cross-entropy in nats, summed over all rows: a float32 scalar (float64 for float64 inputs).

    `hidden`: [rows, d]; `weight`: [vocabulary, d]; `labels`: int64 [rows], each in [0, vocabulary) or IGNORED, for a row
    without loss or gradient; `bias`: [vocabulary].
    The logits are `z = scale (hidden weight^T + bias)`, then `cap tanh(z / cap)` where `cap` is above 0 (Gemma 2).
    `chunk_rows`: logits of so many rows are held at once; None: as many as fit into BUFFER bytes.
    `fp8_scales`: float32 [1, vocabulary]; `weight` are then the codes of a frozen head in fp8 (kernels/fp8_ends.py), whose logits
    are a product in fp8. `by`: who multiplies in 16 bits where nothing is added, see kernels/matmul.py.

    Matmuls run in autocast's dtype, or else in the weight's. The device is never waited for.
    A label outside of the vocabulary gives nan on a GPU and IndexError or RuntimeError on a CPU.
    """
    dtype = _compute_dtype(weight, fp8_scales)
    inputs = (hidden, weight, bias)
    wanted = [torch.is_grad_enabled() and one is not None and one.requires_grad for one in inputs]
    if any(wanted):
        loss: torch.Tensor = _LinearCrossEntropy.apply(*inputs, labels, dtype, scale, cap, chunk_rows, fp8_scales, by)
        return loss
    return _run(*inputs, labels, dtype, scale, cap, chunk_rows, fp8_scales, by, wanted)[0].sum()


def row_losses(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    scale: float = 1.0,
    cap: float = 0.0,
    chunk_rows: int | None = None,
    fp8_scales: torch.Tensor | None = None,
    by: str = CUBLAS,
) -> torch.Tensor:
    """The loss of each row, [rows] in float32, without a gradient. Arguments as for linear_cross_entropy()."""
    dtype = _compute_dtype(weight, fp8_scales)
    return _run(hidden, weight, bias, labels, dtype, scale, cap, chunk_rows, fp8_scales, by, [False, False, False])[0]


def rows_at_once(vocabulary: int, dtype: torch.dtype) -> int:
    """How many rows' logits fit into BUFFER bytes: a multiple of 128, from 128 to 65,536."""
    fit = BUFFER // (vocabulary * dtype.itemsize)
    return min(max(fit // 128 * 128, 128), 65536)


def equal(rows: int, most: int) -> list[int]:
    """Rows of each chunk, none above `most`: as many in each, since a last chunk of few rows would be a slow matmul."""
    step = -(-rows // -(-rows // most)) if rows else 1
    return [min(step, rows - start) for start in range(0, rows, step)]


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        dtype: torch.dtype,
        scale: float,
        cap: float,
        chunk_rows: int | None,
        fp8_scales: torch.Tensor | None,
        by: str,
    ) -> torch.Tensor:
        losses, *gradients = _run(
            hidden, weight, bias, labels, dtype, scale, cap, chunk_rows, fp8_scales, by, list(ctx.needs_input_grad[:3])
        )
        ctx.save_for_backward(*gradients)
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (*(one if one is None else _scaled(one, factor) for one in ctx.saved_tensors), *[None] * 7)


@torch.no_grad()
def _run(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    dtype: torch.dtype,
    scale: float,
    cap: float,
    chunk_rows: int | None,
    fp8_scales: torch.Tensor | None,
    by: str,
    wanted: list[bool],
) -> tuple[torch.Tensor, Any, Any, Any]:
    """The loss of each row, and the gradient of their sum after hidden, weight and bias, each None unless wanted."""
    (rows, _), (vocabulary, width) = hidden.shape, weight.shape
    exact = torch.float64 if dtype is torch.float64 else torch.float32
    losses = hidden.new_empty(rows, dtype=exact)
    d_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format) if wanted[0] else None
    d_weight = weight.new_zeros(vocabulary, width, dtype=exact) if wanted[1] else None
    d_bias = weight.new_zeros(vocabulary, dtype=exact) if wanted[2] else None
    with torch.autocast(hidden.device.type, enabled=False):
        head, offset = _head(weight, fp8_scales, dtype, wanted[0]), None if bias is None else bias.to(dtype)
        most = min(chunk_rows or rows_at_once(vocabulary, dtype), max(rows, 1))
        sizes = equal(rows, most)
        # On a GPU rows begin on a multiple of 64 numbers: matmuls and the kernel load 16 bytes at a time. On a CPU they must
        # not: oneDNN's bfloat16 matmul reads what lies between two rows, and nan times its zeros is nan (torch 2.13). Neither
        # for fp8, whose product takes no result with gaps, and whose vocabulary is a multiple of 16 as it is.
        stride = -(-vocabulary // 64) * 64 if hidden.is_cuda and fp8_scales is None else vocabulary
        buffer = torch.empty(max(sizes, default=1), stride, dtype=dtype, device=hidden.device)[:, :vocabulary]
        for size, end in zip(sizes, itertools.accumulate(sizes), strict=True):
            chunk = slice(end - size, end)
            inputs, logits = hidden[chunk].to(dtype), buffer[:size]
            if fp8_scales is not None:
                scaled_mm(quantize_rows(hidden[chunk]), weight, fp8_scales, logits)
                if offset is not None:
                    logits += offset
            elif offset is None:
                mm(inputs, head.t(), logits, by)
            else:
                torch.addmm(offset, inputs, head.t(), out=logits)
            _softmax_gradient(logits, labels[chunk], losses[chunk], scale, cap, any(wanted))
            if d_hidden is not None and d_hidden.dtype is dtype:
                mm(logits, head, d_hidden[chunk], by)
            elif d_hidden is not None:
                d_hidden[chunk] = logits @ head
            if d_weight is not None:
                _add_outer(d_weight, logits, inputs)
            if d_bias is not None:
                d_bias += logits.sum(0, dtype=exact)
    return losses, d_hidden, _as(d_weight, weight), _as(d_bias, bias)


def _softmax_gradient(
    logits: torch.Tensor, labels: torch.Tensor, losses: torch.Tensor, scale: float, cap: float, gradient: bool
) -> None:
    """Write each row's loss into `losses`; where `gradient`, replace the logits by their gradient."""
    if logits.device.type == "cuda":
        from fxtune.kernels.cross_entropy_triton import softmax_gradient

        softmax_gradient(logits, labels, losses, scale, cap, gradient, IGNORED)
        return
    none = labels == IGNORED
    at = labels.where(~none, 0)[:, None]
    z = logits.to(losses.dtype) * scale
    slope = scale
    if cap:
        bent = torch.tanh(z / cap)
        z, slope = cap * bent, scale * (1 - bent * bent)  # type: ignore[assignment]
    z = z - z.amax(-1, keepdim=True)  # first: differences of large logits are exact, their logarithms' are not
    total = z.exp().sum(-1, keepdim=True).log_()
    losses.copy_((total - z.gather(1, at)).squeeze(1)).masked_fill_(none, 0.0)
    if gradient:
        z = (z - total).exp_()
        z.scatter_add_(1, at, z.new_full((len(z), 1), -1.0))
        logits.copy_(z * slope).masked_fill_(none[:, None], 0.0)


def _add_outer(total: torch.Tensor, logits: torch.Tensor, inputs: torch.Tensor) -> None:
    """total += logits^T inputs, added up in `total`'s dtype, a block of the vocabulary at a time so that little is held."""
    block = max(PART // total.shape[1], 128)
    for start in range(0, total.shape[0], block):
        part = logits[:, start : start + block].t()
        if logits.dtype is total.dtype:
            total[start : start + block].addmm_(part, inputs)
        elif logits.device.type == "cuda":
            total[start : start + block] += torch.mm(part, inputs, out_dtype=total.dtype)
        else:
            total[start : start + block].addmm_(part.to(total.dtype), inputs.to(total.dtype))


def _scaled(gradient: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """gradient * factor, multiplied in float32: one over the step's tokens is not a bfloat16 number."""
    if gradient.is_cuda and gradient.dtype is not torch.float64:
        from fxtune.kernels.cross_entropy_triton import scaled

        return scaled(gradient, factor)
    out = torch.empty_like(gradient)
    block = max(PART // max(gradient[0].numel() if len(gradient) else 1, 1), 1)
    for into, rows in zip(out.split(block), gradient.split(block), strict=True):
        into.copy_(rows.to(factor.dtype) * factor)
    return out


def _as(gradient: torch.Tensor | None, like: torch.Tensor | None) -> torch.Tensor | None:
    return gradient if gradient is None or like is None else gradient.to(like.dtype)


def _head(weight: torch.Tensor, fp8_scales: torch.Tensor | None, dtype: torch.dtype, gradient: bool) -> torch.Tensor:
    """The head's matrix in `dtype`. Of one in fp8 only the hidden states' gradient has a use for it."""
    if fp8_scales is None:
        return weight.to(dtype)
    return dequantize_weight(weight, fp8_scales, dtype) if gradient else weight


def _compute_dtype(weight: torch.Tensor, fp8_scales: torch.Tensor | None) -> torch.dtype:
    if fp8_scales is not None:
        return torch.bfloat16
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


def plain(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    scale: float = 1.0,
    cap: float = 0.0,
) -> torch.Tensor:
    """The same with all logits at once, as autograd does it: what the operator is compared with. float32 losses [rows]."""
    return F.cross_entropy(bent(F.linear(hidden, weight, bias), scale, cap).float(), labels, reduction="none")


def bent(logits: torch.Tensor, scale: float, cap: float) -> torch.Tensor:
    """Logits as the model means them: scaled, then soft-capped where `cap` is above 0."""
    if scale != 1.0:
        logits = logits * scale
    return cap * torch.tanh(logits / cap) if cap else logits
