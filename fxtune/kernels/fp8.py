"""Frozen linears in fp8. Weights and activations are e4m3 numbers with a scale for each row, and are multiplied at
twice the speed of bfloat16.

A frozen linear has two products: y = x W^T forward, and dx = dy W backward. Both run on tensor cores in e4m3 (3 bits
of mantissa, 4 of exponent, up to 448). A number of the result is multiplied by the scale of its row (of x or dy) and
of its column (of the weight), and rounded to bfloat16. A scale is a row's largest absolute value over 448, so an
outlier costs precision only in its own row. On an H200 these products run at 1,000 to 1,300 TFLOP/s, and products in
bfloat16 at 700 (`torch._scaled_mm`, fast accumulation).

Hopper's tensor cores read fp8 only along the dimension of the sum. dy W sums over W's rows, so it needs W^T as a
separate matrix. There are two ways:

- W and W^T are kept. They take 2 bytes a weight, as bfloat16 does, so the gain is time and not memory. The scales of
  weights are powers of two, so that W^T has the same numbers as W. (Only numbers some 2,000 times smaller than the
  largest of their column lose bits.)
- Only W is kept, 1 byte a weight. Since W = diag(scales) @ codes, dy W = (dy * scales) @ codes: dy is multiplied by
  the scales before it is quantized. Each backward product transposes the codes, which moves 2 bytes a weight.

Activations and gradients are quantized by rows in each call, once for all linears that read them (fp8_triton.py; plain
torch on a CPU). The relative error is 0.026 for each operand and 0.037 for a product: noise without a preferred
direction. Sources: rowwise scales as in FBGEMM and torchao (arXiv 2507.14111), e4m3 for activations and gradients as
in DeepSeek-V3 (arXiv 2412.19437).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from fxtune.upstream import torch as upstream

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
MULTIPLE = 16
"""The sizes of each matrix in an fp8 product are multiples of this."""
SMALLEST = 2.0**-100
"""The smallest scale, far below the scale of any gradient."""
PART = 64 * 2**20
"""Numbers that the quantization in plain torch casts to float32 at a time."""


class Weight(NamedTuple):
    """A frozen weight [out, in] in the layout of both products, or the weights [experts, out, in] of all experts."""

    codes: Tensor
    """[out, in]: e4m3, or uint8 with the bits of e4m3, for libraries that look at a model's dtypes."""
    scales: Tensor
    """float32 [1, out] or [experts, out], powers of two."""
    back: Tensor | None = None
    """The transposes, in the dtype of `codes`, with contiguous rows. None: backward products transpose W."""
    back_scales: Tensor | None = None
    """float32 [1, in] or [experts, in], powers of two; None if `back` is None."""


@torch.no_grad()
def quantize_rows(x: Tensor, powers: bool = False, columns: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`x` [rows, width] as contiguous e4m3 codes and a float32 scale for each row, [rows, 1]: x is about codes *
    scales. `powers`: round scales up to a power of two. `columns`: float32 [width]; the columns of x are multiplied by
    these numbers before the scales are chosen. Rows of zeros get the scale SMALLEST. NaN and infinity in x do not
    become finite.
    """
    codes = torch.empty(x.shape, dtype=E4M3, device=x.device)
    scales = torch.empty(len(x), 1, dtype=torch.float32, device=x.device)
    if x.is_cuda:
        from fxtune.kernels import fp8_triton

        fp8_triton.quantize_rows(x if x.stride(1) == 1 else x.contiguous(), codes, scales, SMALLEST, powers, columns)
        return codes, scales
    size = max(PART // max(x.shape[1], 1), 1)
    for rows, into, scale in zip(x.split(size), codes.split(size), scales.split(size), strict=True):
        wide = rows.float() if columns is None else rows.float() * columns.view(1, -1)
        scale.copy_((wide.abs().amax(1, keepdim=True) * (1 / LARGEST)).clamp_(min=SMALLEST))
        if powers:  # round up to a power of two: add the largest mantissa, then clear the mantissa
            scale.copy_(((scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32))
        into.copy_((wide * scale.reciprocal()).to(E4M3))
    return codes, scales


def dequantize_rows(codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """`codes` [rows, width], e4m3 or uint8, times `scales` (float32, one for each row)."""
    return (codes.view(E4M3).to(torch.float32) * scales.view(-1, 1)).to(dtype)


def dequantize_weight(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """dequantize_rows() without a float32 copy: the scales are powers of two, so bfloat16 holds them exactly."""
    if codes.is_cuda and codes.is_contiguous():
        from fxtune.kernels import fp8_triton

        weight = torch.empty(codes.shape, dtype=dtype, device=codes.device)
        return fp8_triton.dequantize_rows(codes.view(E4M3), scales, weight)
    if dtype is torch.bfloat16:
        return codes.view(E4M3).to(dtype).mul_(scales.view(-1, 1).to(dtype))
    return dequantize_rows(codes, scales, dtype)


def quantize_weight(weight: Tensor, transpose: bool = True) -> Weight:
    """Quantize a weight [out, in] of any floating dtype. `transpose`: keep its transpose, too; making it takes two
    temporary bfloat16 copies."""
    return weight_of(*quantize_rows(weight, powers=True), transpose)


@torch.no_grad()
def weight_of(codes: Tensor, scales: Tensor, transpose: bool = True) -> Weight:
    """The Weight of `codes` [out, in] and `scales`, float32, one for each row. `transpose`: make `back`, too."""
    half = Weight(codes.view(torch.uint8), scales.view(1, -1))
    return Weight(half.codes, half.scales, *transposed(codes, scales)) if transpose else half


@torch.no_grad()
def transposed(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """`back` and `back_scales` of a Weight from `codes` [out, in] and `scales`. Each row of `back` depends on one
    column of `codes`."""
    transpose = dequantize_weight(codes, scales, torch.bfloat16).t().contiguous()
    back, back_scales = quantize_rows(transpose, powers=True)
    return back.view(torch.uint8), back_scales.view(1, -1)


def scaled_mm(x: tuple[Tensor, Tensor], codes: Tensor, scales: Tensor, out: Tensor | None = None) -> Tensor:
    """The product of `x`, a result of quantize_rows(), and the transpose of `codes`: bfloat16 [rows, n], in `out` if
    given.

    `x`: e4m3 [rows, k] and float32 [rows, 1]. `codes`: e4m3 or uint8 [n, k]; `scales`: float32 [1, n]; both are copied
    unless contiguous. k and n are multiples of 16.
    """
    (left, left_scales), right = x, codes.contiguous().view(E4M3)
    shape = len(left), len(right)
    out = torch.empty(shape, dtype=torch.bfloat16, device=left.device) if out is None else out
    assert (out.shape, out.dtype) == (shape, torch.bfloat16)
    if left.is_cuda and not out.is_contiguous():
        return out.copy_(scaled_mm(x, codes, scales))
    if not left.is_cuda:
        return out.copy_((left.float() @ right.float().t()).mul_(left_scales).mul_(scales))
    if shape[0]:  # cuBLAS takes no matrix without rows
        upstream.scaled_mm(
            left,
            right.t(),
            scale_a=left_scales,
            scale_b=scales.contiguous(),
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
            out=out,
        )
    return out


def times_codes(dy: tuple[Tensor, Tensor], codes: Tensor, out: Tensor | None = None) -> Tensor:
    """dy W [rows, in] for a weight whose transpose is not kept. `dy`: the result of quantize_rows(dy, columns=scales),
    with the weight's scales; `out`: see scaled_mm()."""
    back = turned(codes)
    return scaled_mm(dy, back, torch.ones(1, len(back), device=codes.device), out)


def turned(codes: Tensor) -> Tensor:
    """The transpose [..., in, out] of `codes` [..., out, in], or of each of several matrices, as contiguous uint8."""
    codes = codes.view(torch.uint8)
    back = codes.new_empty(codes.mT.shape)
    if not codes.is_cuda:
        return back.copy_(codes.mT)
    from fxtune.kernels import fp8_triton

    fp8_triton.transpose(codes, back)
    return back


def linear(x: Tensor, weight: Weight) -> Tensor:
    """x W^T, differentiable in x alone. `x`: [..., in] of any floating dtype. The result [..., out] has x's dtype."""
    back = None if weight.back is None else weight.back.t()
    return torch.ops.fxtune.fp8_linear(x, weight.codes.t(), weight.scales, back, weight.back_scales)


@torch.library.custom_op("fxtune::fp8_linear", mutates_args=())
def fp8_linear(x: Tensor, weight: Tensor, scales: Tensor, back: Tensor | None, back_scales: Tensor | None) -> Tensor:
    """x [..., in] times `weight` [in, out] with contiguous columns; the matrix is the second argument, as in aten.mm.

    The backward pass multiplies by `back` [out, in] with `back_scales`. Without `back` it transposes `weight`.
    """
    return _product(x, weight, scales)


@torch.library.custom_op("fxtune::fp8_linear_backward", mutates_args=())
def fp8_linear_backward(dy: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """dy [..., out] times the transpose of `weight` [in, out], whose columns have `scales`."""
    rows = quantize_rows(dy.detach().flatten(0, -2), columns=scales)
    return times_codes(rows, weight.t()).to(dy.dtype).view(*dy.shape[:-1], weight.shape[0])


@fp8_linear_backward.register_fake
def _(dy: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    return dy.new_empty(*dy.shape[:-1], weight.shape[0])


def _product(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    rows = quantize_rows(x.detach().flatten(0, -2))
    return scaled_mm(rows, weight.t(), scales).to(x.dtype).view(*x.shape[:-1], weight.shape[1])


def _shape(x: Tensor, weight: Tensor, *_: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[1])


def _setup(ctx: Any, inputs: tuple[Tensor | None, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    weight, scales, back, back_scales = ctx.saved_tensors
    if back is None:
        return torch.ops.fxtune.fp8_linear_backward(gradient, weight, scales), None, None, None, None
    return torch.ops.fxtune.fp8_linear(gradient, back, back_scales, weight, scales), None, None, None, None


fp8_linear.register_fake(_shape)
fp8_linear.register_autograd(_backward, setup_context=_setup)


def _flops(x: Sequence[int], weight: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * weight[0] * weight[1] * math.prod(x[:-1])


register_flop_formula(torch.ops.fxtune.fp8_linear)(_flops)
register_flop_formula(torch.ops.fxtune.fp8_linear_backward)(_flops)


def head(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """Logits of a frozen fp8 head: x [..., width] times the transpose of `codes` [vocabulary, width].

    The backward pass dequantizes the weight, and its product is not in fp8. A softmax over a vocabulary of 128k has
    most of its numbers near 1e-6, and one near 1. e4m3 cannot hold both, and losing the small numbers would push all
    hidden states the same way.
    """
    return torch.ops.fxtune.fp8_head(x, codes.t(), scales)


@torch.library.custom_op("fxtune::fp8_head", mutates_args=())
def fp8_head(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """x [..., width] times `weight`, the codes [width, vocabulary] with contiguous columns."""
    return _product(x, weight, scales)


def _head_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    weight, scales = ctx.saved_tensors
    return gradient @ dequantize_weight(weight.t(), scales, gradient.dtype), None, None


fp8_head.register_fake(_shape)
fp8_head.register_autograd(_head_backward, setup_context=_setup)
