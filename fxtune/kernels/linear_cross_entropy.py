"""Cross-entropy and log-probabilities of a linear head. Its logits are not kept: loss and gradient are computed chunk
by chunk.

The logits of 64k tokens over a vocabulary of 128k are 16.8 GB in bfloat16. Plain autograd keeps them, their float32
copy and their gradient. But the gradient of a row's cross-entropy is softmax - onehot, up to a factor, and follows
from the row's logits. So a chunk of rows goes from hidden states to gradients in the forward pass, in a buffer that
the next chunk overwrites:

    logits = h W^T                        one matmul, in the head's dtype
    loss, logits <- softmax - onehot      one kernel in float32, in place (cross_entropy_triton.py; torch on a CPU)
    dh = logits W,   dW += logits^T h     two matmuls; only dh for a frozen head, none in evaluation

`linear_cross_entropy` returns the sum over all rows; its backward pass multiplies the stored gradients by one number.
Memory: the buffer, dh, and dW in float32 where the head is trained. Time: the two or three matmuls that any
implementation needs, and the kernel's three passes over the buffer, 5 % of the matmuls' time at d = 4096.

`linear_log_probs` returns one number a row, and its backward pass gets a gradient for each row. With a frozen head it
multiplies each row of the stored dh by the row's gradient. With a trained head it computes each chunk again: dW is a
sum of rows times their gradients, which the forward pass does not know. Liger's kernel has the same idea (arXiv
2410.10989), but its chunks are too small for a fast matmul, and it waits for the device.

Both functions are autograd.Functions and not custom operators: their gradients are by-products of the forward pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fxtune.kernels.autocast import compute_dtype
from fxtune.kernels.fp8 import dequantize_weight, quantize_rows, scaled_mm
from fxtune.kernels.matmul import CUBLAS, mm

BUFFER = 2**30
"""Default size in bytes of one chunk's logits: 4,096 rows of a vocabulary of 128k in bfloat16."""
IGNORED = -100
"""The label of a row without a target: torch.nn.functional.cross_entropy's ignore_index."""
BLOCK = 64 * 2**20
"""How many numbers are converted to float32 at a time when gradients are scaled or added up."""


@dataclass(frozen=True)
class HeadOptions:
    """The computation of logits: `z = scale (hidden weight^T + bias)`, and then `cap tanh(z / cap)` if cap > 0."""

    scale: float = 1.0
    cap: float = 0.0
    """The soft cap, as in Gemma 2. 0: no cap."""
    chunk_rows: int | None = None
    """The most rows of a chunk. None: default_chunk_rows()."""
    fp8_scales: Tensor | None = None
    """float32 [1, vocabulary] for a frozen fp8 head: `weight` holds fp8 codes, and the logits are an fp8 product
    (techniques/quantized_modules.py). None: a head of 16 or 32 bits.
    """
    gemm: str = CUBLAS
    """GEMM backend of 16-bit products without a bias (matmul.py)."""

    def compute_dtype(self, weight: Tensor) -> torch.dtype:
        """The dtype of the matmuls: autocast's dtype, or the weight's without autocast; bfloat16 for an fp8 head."""
        return compute_dtype(weight) if self.fp8_scales is None else torch.bfloat16


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None, **options: Any
) -> Tensor:
    """Cross-entropy in nats, summed over all rows: a float32 scalar (float64 for float64 inputs).

    `hidden`: [rows, d]; `weight`: [vocabulary, d]; `labels`: int64 [rows], each in [0, vocabulary), or IGNORED for a
    row without loss or gradient; `bias`: [vocabulary]; `options`: the fields of HeadOptions.

    The call never waits for the device. A label outside of the vocabulary gives nan on a GPU, and on a CPU an
    IndexError or a RuntimeError.
    """
    head = HeadOptions(**options)
    inputs: tuple[Any, ...] = hidden, weight, bias, labels, head.compute_dtype(weight), head
    if _require_grad(hidden, weight, bias):
        return _SummedLoss.apply(*inputs)
    return _losses_and_gradients(*inputs)[0].sum()


def linear_log_probs(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None, **options: Any
) -> Tensor:
    """The log-probability of each row's label in nats, float32 [rows]; 0 for an IGNORED row.

    Each row may have its own upstream gradient. Arguments: see linear_cross_entropy().
    """
    head = HeadOptions(**options)
    inputs: tuple[Any, ...] = hidden, weight, bias, labels, head.compute_dtype(weight), head
    if _require_grad(hidden, weight, bias):
        return _LogProbs.apply(*inputs)
    return -_losses_and_gradients(*inputs)[0]


def default_chunk_rows(vocabulary: int, dtype: torch.dtype) -> int:
    """The number of rows whose logits fit into BUFFER bytes: a multiple of 128, from 128 to 65,536."""
    fit = BUFFER // (vocabulary * dtype.itemsize)
    return min(max(fit // 128 * 128, 128), 65536)


def chunk_sizes(rows: int, max_rows: int) -> list[int]:
    """The number of rows of each chunk. They are about equal, because a last chunk of few rows is a slow matmul."""
    step = -(-rows // -(-rows // max_rows)) if rows else 1
    return [min(step, rows - start) for start in range(0, rows, step)]


class _SummedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        losses, *gradients = _losses_and_gradients(*(*inputs, ctx.needs_input_grad[:3]))
        ctx.save_for_backward(*gradients)
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        return (
            *(None if saved is None else scaled_gradient(saved, factor) for saved in ctx.saved_tensors),
            None,
            None,
            None,
        )


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        *tensors, ctx.dtype, ctx.head = inputs
        ctx.trained = any(ctx.needs_input_grad[1:3])
        losses, d_hidden, _, _ = _losses_and_gradients(*(*inputs, [not ctx.trained, False, False]))
        ctx.save_for_backward(*(tensors if ctx.trained else (d_hidden,)))
        return -losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.trained:
            return scaled_gradient(ctx.saved_tensors[0], -upstream), None, None, None, None, None
        inputs: tuple[Any, ...] = *ctx.saved_tensors, ctx.dtype, ctx.head, ctx.needs_input_grad[:3], -upstream
        return *_losses_and_gradients(*inputs)[1:], None, None, None


@torch.no_grad()
def _losses_and_gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    dtype: torch.dtype,
    options: HeadOptions,
    needs_grad: Sequence[bool] = (False, False, False),
    upstream: Tensor | None = None,
) -> tuple[Tensor, Any, Any, Any]:
    """(losses [rows], d_hidden, d_weight, d_bias). The last three are the gradients of sum(upstream * losses), or None
    where `needs_grad` is false. `upstream`: [rows]. None: 1 for each row."""
    (rows, _), (vocabulary, width) = hidden.shape, weight.shape
    fp8_scales, sum_dtype = options.fp8_scales, torch.promote_types(dtype, torch.float32)
    losses = hidden.new_empty(rows, dtype=sum_dtype)
    d_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format) if needs_grad[0] else None
    d_weight = weight.new_zeros(vocabulary, width, dtype=sum_dtype) if needs_grad[1] else None
    d_bias = weight.new_zeros(vocabulary, dtype=sum_dtype) if needs_grad[2] else None
    with torch.autocast(hidden.device.type, enabled=False):
        head, cast_bias = weight, None if bias is None else bias.to(dtype)
        if fp8_scales is None:
            head = weight.to(dtype)
        elif needs_grad[0]:  # the gradient of the hidden states is a product in 16 bits
            head = dequantize_weight(weight, fp8_scales, dtype)
        sizes = chunk_sizes(rows, min(options.chunk_rows or default_chunk_rows(vocabulary, dtype), max(rows, 1)))
        # On a GPU the buffer's rows are padded to a multiple of 64 numbers: matmuls and the kernel load 16 bytes at a
        # time. On a CPU there is no padding: oneDNN's bfloat16 matmul would multiply the uninitialized numbers by
        # zeros, and 0 * nan is nan. For fp8 there is none, because scaled_mm writes rows without padding.
        stride = -(-vocabulary // 64) * 64 if hidden.is_cuda and fp8_scales is None else vocabulary
        buffer = torch.empty(max(sizes, default=1), stride, dtype=dtype, device=hidden.device)[:, :vocabulary]
        for size, end in zip(sizes, itertools.accumulate(sizes), strict=True):
            chunk = slice(end - size, end)
            inputs, logits = hidden[chunk].to(dtype), buffer[:size]
            if fp8_scales is not None:
                scaled_mm(quantize_rows(hidden[chunk]), weight, fp8_scales, logits)
                if cast_bias is not None:
                    logits += cast_bias
            elif cast_bias is None:
                mm(inputs, head.t(), logits, options.gemm)
            else:
                torch.addmm(cast_bias, inputs, head.t(), out=logits)
            _softmax_gradient(logits, labels[chunk], losses[chunk], options.scale, options.cap, any(needs_grad))
            if upstream is not None:
                logits *= upstream[chunk, None]
            if d_hidden is not None and d_hidden.dtype is dtype:
                mm(logits, head, d_hidden[chunk], options.gemm)
            elif d_hidden is not None:
                d_hidden[chunk] = logits @ head
            if d_weight is not None:
                _add_outer(d_weight, logits, inputs)
            if d_bias is not None:
                d_bias += logits.sum(0, dtype=sum_dtype)
            del logits
        del buffer  # before _cast_like() needs memory for copies of the gradients
    return losses, d_hidden, _cast_like(d_weight, weight), _cast_like(d_bias, bias)


def _softmax_gradient(
    logits: Tensor, labels: Tensor, losses: Tensor, scale: float, cap: float, gradient: bool
) -> None:
    """Write each row's loss into `losses`. With `gradient`, replace each row's logits by the gradient of its loss."""
    if logits.device.type == "cuda":
        from fxtune.kernels.cross_entropy_triton import softmax_gradient

        softmax_gradient(logits, labels, losses, scale, cap, gradient, IGNORED)
        return
    ignored = labels == IGNORED
    targets = labels.where(~ignored, 0)[:, None]
    z = logits.to(losses.dtype) * scale
    slope = scale
    if cap:
        tanh = torch.tanh(z / cap)
        z, slope = cap * tanh, scale * (1 - tanh * tanh)  # type: ignore[assignment]
    # Subtract the maximum before exp and log: a difference of large logits is exact, one of large logarithms is not.
    z = z - z.amax(-1, keepdim=True)
    total = z.exp().sum(-1, keepdim=True).log_()
    losses.copy_((total - z.gather(1, targets)).squeeze(1)).masked_fill_(ignored, 0.0)
    if gradient:
        z = (z - total).exp_()
        z.scatter_add_(1, targets, z.new_full((len(z), 1), -1.0))
        logits.copy_(z * slope).masked_fill_(ignored[:, None], 0.0)


def _add_outer(total: Tensor, logits: Tensor, inputs: Tensor) -> None:
    """total += logits^T inputs in `total`'s dtype."""
    if logits.dtype is total.dtype:
        total.addmm_(logits.t(), inputs)
    elif logits.is_cuda:
        torch.addmm(total, logits.t(), inputs, out_dtype=total.dtype, out=total)
    else:  # a block of the vocabulary at a time, to keep the converted copies small
        block = max(BLOCK // total.shape[1], 128)
        for rows, part in zip(total.split(block), logits.t().split(block), strict=True):
            rows.addmm_(part.to(total.dtype), inputs.to(total.dtype))


def scaled_gradient(gradient: Tensor, factor: Tensor) -> Tensor:
    """gradient * factor, multiplied in float32: bfloat16 would round a factor such as 1 / (the step's tokens).

    `factor`: a scalar, or [rows].
    """
    if gradient.is_cuda and gradient.dtype is not torch.float64 and not factor.dim():
        from fxtune.kernels.cross_entropy_triton import scaled

        return scaled(gradient, factor)
    out = torch.empty_like(gradient)
    block = max(BLOCK // max(gradient[0].numel() if len(gradient) else 1, 1), 1)
    for start in range(0, len(gradient), block):
        rows = slice(start, start + block)
        out[rows] = gradient[rows].to(factor.dtype) * (factor[rows, None] if factor.dim() else factor)
    return out


def _require_grad(*inputs: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in inputs)


def _cast_like(gradient: Tensor | None, parameter: Tensor | None) -> Tensor | None:
    return gradient if gradient is None or parameter is None else gradient.to(parameter.dtype)


def scale_and_cap(logits: Tensor, scale: float, cap: float) -> Tensor:
    """Logits as the model defines them: scaled, then soft-capped if `cap` is above 0."""
    if scale != 1.0:
        logits = logits * scale
    return cap * torch.tanh(logits / cap) if cap else logits
