"""The short causal convolution over each channel of packed documents, before linear attention or in its place:

    y[t, d] = act(bias[d] + sum over w of weight[d, w] x[t - (W - 1) + w, d])

where tokens before a document's first count as zero. On a GPU the kernels are flash-linear-attention's; on a CPU W
shifted products. The backward pass computes the result again, with W multiplications an element.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor
from torch.nn import functional as F

from fxtune.kernels import fla_package
from fxtune.upstream import fla


def short_convolution(
    x: Tensor, weight: Tensor, bias: Optional[Tensor], silu: bool, cu_seqlens: Tensor, chunks: Tensor
) -> Tensor:
    """[tokens, channels], in the dtype of `x` [tokens, channels], for the documents that `cu_seqlens` (int32) bounds.
    weight [channels, W]; bias [channels]; chunks: see linear_attention.document_chunks(). `cu_seqlens` ends at
    `tokens`: padding is a document of its own."""
    return torch.ops.fxtune.short_convolution(x, weight, bias, silu, cu_seqlens, chunks)


@torch.library.custom_op("fxtune::short_convolution", mutates_args=())
def _convolution(
    x: Tensor, weight: Tensor, bias: Optional[Tensor], silu: bool, cu_seqlens: Tensor, chunks: Tensor
) -> Tensor:
    if x.is_cuda:
        fla_package.prepare()
        return fla.convolution(x, weight, bias, silu, cu_seqlens, chunks)
    y = _sums(x, weight, bias, cu_seqlens)
    return (F.silu(y) if silu else y).to(x.dtype)


@_convolution.register_fake
def _(x: Tensor, weight: Tensor, bias: Optional[Tensor], silu: bool, cu_seqlens: Tensor, chunks: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("fxtune::short_convolution_backward", mutates_args=())
def _backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Optional[Tensor], silu: bool, cu_seqlens: Tensor, chunks: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, weight and bias. Without bias its gradient is an empty tensor."""
    if x.is_cuda:
        return fla.convolution_backward(grad, x, weight, bias, silu, cu_seqlens, chunks)
    dy = grad.float()
    if silu:
        y = _sums(x, weight, bias, cu_seqlens)
        gate = y.sigmoid()
        dy = dy * gate * (1 + y * (1 - gate))
    width, dx, columns = weight.shape[1], torch.zeros_like(x, dtype=torch.float32), []
    for at in range(width):
        back = width - 1 - at
        inside = _same_document(cu_seqlens, len(x), back)
        columns.append((dy * _shifted(x.float(), back) * inside).sum(0))
        dx += F.pad((dy * inside * weight[:, at].float())[back:], (0, 0, 0, back))
    dbias = x.new_empty(0) if bias is None else dy.sum(0).to(bias.dtype)
    return dx.to(x.dtype).contiguous(), torch.stack(columns, 1).to(weight.dtype), dbias


@_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, bias: Optional[Tensor], *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    return dx, torch.empty_like(weight), x.new_empty(0) if bias is None else torch.empty_like(bias)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, ctx.silu, cu_seqlens, chunks = inputs
    ctx.save_for_backward(x, weight, bias, cu_seqlens, chunks)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, weight, bias, *bounds = ctx.saved_tensors
    dx, dweight, dbias = torch.ops.fxtune.short_convolution_backward(grad, x, weight, bias, ctx.silu, *bounds)
    return dx, dweight, None if bias is None else dbias, None, None, None


_convolution.register_autograd(_gradients, setup_context=_setup)


def _sums(x: Tensor, weight: Tensor, bias: Optional[Tensor], cu_seqlens: Tensor) -> Tensor:
    """The convolution before its activation, in float32."""
    width, x = weight.shape[1], x.float()
    y = torch.zeros_like(x) if bias is None else bias.float().expand_as(x)
    for at in range(width):
        back = width - 1 - at
        y = y + weight[:, at].float() * _shifted(x, back) * _same_document(cu_seqlens, len(x), back)
    return y


def _shifted(x: Tensor, back: int) -> Tensor:
    """Row t holds row t - back of x; the first rows are zero."""
    return F.pad(x, (0, 0, back, 0))[: len(x)]


def _same_document(cu_seqlens: Tensor, tokens: int, back: int) -> Tensor:
    """[tokens, 1]: whether the token `back` before each is in the same document."""
    at = torch.arange(tokens, device=cu_seqlens.device)
    begin = cu_seqlens.long()[torch.searchsorted(cu_seqlens.long(), at, right=True) - 1]
    return (at - back >= begin).unsqueeze(1)
