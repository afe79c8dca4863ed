"""A trained linear in fp8: its three products take e4m3 numbers, at nearly twice the speed of bfloat16.

Full fine-tuning has three products for each linear: y = x W^T, dx = dy W and dW = dy^T x. All weights stay in 16 or
32 bits for the optimizer. Each call quantizes its operands, with new scales. So fp8 adds no state to the weights: a
checkpoint, a resumed run and an export know nothing of fp8.

- In y and dx, x and dy have a scale for each row (a token), so a token with large numbers costs the others no
  precision. W has one scale. e4m3 is a floating-point format: a scale moves its range, 2^15, and does not change its
  relative error of 0.026.
- Hopper's tensor cores read fp8 only along the dimension of the sum, so dx needs W^T, and dW needs x^T and dy^T. One
  kernel writes a matrix and its transpose in one pass (fp8_triton.quantize_both(): 2 bytes read and 2 written a
  number).
- dW sums over tokens, so a token's scale cannot be applied to the result. The codes of x are transposed, and each row
  of dy is multiplied by the scale of its row of x: dW = (diag(x scales) dy)^T codes. All rows of this scaled dy have
  one scale, which follows from the rows' scales without reading dy again. So a token with numbers thousands of times
  larger costs the other tokens precision in dW: one activation of 1e5 among 2,048 tokens raises the error of dW's
  other columns from 0.04 to about 0.1. techniques.float8 can compute dW in bfloat16 (weight_gradient), or leave a
  linear in 16 bits (skip).

The forward pass keeps the codes of x^T, 1 byte a number in place of 2. W is quantized in the forward pass and again in
the backward pass: keeping W^T would take a byte a weight, and quantizing it takes 0.4 % of a step (computed). Sums
over tokens are long, so dW is accumulated in float32 throughout. The other products use the tensor cores' fast
accumulation, as in fp8.py.

On a CPU plain torch computes the products from the same codes. Sources: rowwise scales as in FBGEMM and torchao (arXiv
2507.14111), e4m3 for gradients and exact accumulation as in DeepSeek-V3 (arXiv 2412.19437).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxtune.kernels.autocast import compute_dtype
from fxtune.kernels.fp8 import E4M3, LARGEST, MULTIPLE, SMALLEST
from fxtune.upstream import torch as upstream


def linear(x: Tensor, weight: Tensor, fp8_weight_gradient: bool = True) -> Tensor:
    """x W^T, differentiable in x and W. `x`: [..., in], `weight`: [out, in], both floating; the result is [..., out]
    in autocast's dtype, or in x's.

    The result and the gradient of x are rounded to bfloat16, and the gradient of the weight to the weight's dtype.
    `fp8_weight_gradient=False`: the gradient of the weight is a product in bfloat16. in and out are multiples of 16.
    """
    dtype = compute_dtype(x)
    with torch.autocast(x.device.type, enabled=False):
        made: Tensor = _Linear.apply(x, weight, dtype, fp8_weight_gradient)
    return made


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dtype: torch.dtype, fp8_weight_gradient: bool) -> Tensor:
        rows = x.flatten(0, -2)
        scales, scale = row_scales(rows), tensor_scale(weight)
        factors = scales.reciprocal()
        if fp8_weight_gradient:
            codes, saved_x = torch.ops.fxtune.fp8_both(rows, factors, factors)
        else:
            codes, saved_x = quantized(rows, factors), rows.to(torch.bfloat16)
        product = scaled_mm(codes, quantized(weight, scale.reciprocal()).t(), scales, scale)
        ctx.save_for_backward(saved_x, scales, weight, scale)
        ctx.fp8_weight_gradient, ctx.x_dtype = fp8_weight_gradient, x.dtype
        return product.to(dtype).view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        saved_x, scales, weight, scale = ctx.saved_tensors
        dy = gradient.flatten(0, -2)
        dy_scales = row_scales(dy)
        if ctx.fp8_weight_gradient:
            common_scale = (dy_scales * scales).amax().clamp(min=SMALLEST)
            codes, back = torch.ops.fxtune.fp8_both(dy, dy_scales.reciprocal(), scales / common_scale)
            dweight = scaled_mm(back, saved_x.t(), common_scale, None, weight.dtype)
        else:
            codes = quantized(dy, dy_scales.reciprocal())
            dweight = (dy.to(torch.bfloat16).t() @ saved_x).to(weight.dtype)
        transposed = torch.ops.fxtune.fp8_transpose(weight, scale.reciprocal().expand(len(weight)))
        dx = scaled_mm(codes, transposed.t(), dy_scales, scale).to(ctx.x_dtype)
        return dx.view(*gradient.shape[:-1], weight.shape[1]), dweight, None, None


def row_scales(x: Tensor) -> Tensor:
    """float32 [rows]: the largest absolute value of each row of `x` [rows, width] over LARGEST. NaN stays NaN."""
    return (x.abs().amax(1).float() * (1 / LARGEST)).clamp(min=SMALLEST)


def tensor_scale(x: Tensor) -> Tensor:
    """One scale for all of `x`, made as row_scales() makes scales: a float32 scalar."""
    return (x.abs().amax().float() * (1 / LARGEST)).clamp(min=SMALLEST)


def quantized(x: Tensor, factors: Tensor) -> Tensor:
    """x * factors as e4m3, for `x` [rows, width]. `factors`: a scalar, or one for each row. The compiler fuses it."""
    return (x.float() * (factors if factors.dim() == 0 else factors.unsqueeze(1))).to(E4M3)


def scaled_mm(
    left: Tensor, right: Tensor, scales: Tensor, scale: Tensor | None, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """left right [rows, columns] in `dtype`, for `left` [rows, k] with contiguous rows and `right` [k, columns] with
    contiguous columns, both e4m3.

    `scales`: a scale for each row of `left`, with `scale` as the scale of `right`. Or `scales` is a scalar and `scale`
    may be None; sums are then accumulated in float32 throughout. k and the columns are multiples of 16.
    """
    if not left.is_cuda:
        product = (left.float() @ right.float()) * (scales.unsqueeze(1) if scales.dim() else scales)
        return (product if scale is None else product * scale).to(dtype)
    if scales.dim():
        assert scale is not None
        columns = scale.expand(1, right.shape[1]).contiguous()
        return upstream.scaled_mm(
            left, right, scale_a=scales.unsqueeze(1), scale_b=columns, out_dtype=dtype, use_fast_accum=True
        )
    right_scale = torch.ones_like(scales) if scale is None else scale
    return upstream.scaled_mm(left, right, scale_a=scales, scale_b=right_scale, out_dtype=dtype)


@torch.library.custom_op("fxtune::fp8_both", mutates_args=())
def fp8_both(x: Tensor, factors: Tensor, back_factors: Tensor) -> tuple[Tensor, Tensor]:
    """Two e4m3 matrices: x * factors [rows, width], and the transpose of x * back_factors, with columns of zeros up to
    a multiple of 16 columns. `x`: [rows, width]; `factors`, `back_factors`: float32, one for each row."""
    codes, back = _empty_both(x)
    if x.is_cuda:
        from fxtune.kernels import fp8_triton

        x = x if x.stride(1) == 1 else x.contiguous()
        fp8_triton.quantize_both(x, factors.contiguous(), codes, back_factors.contiguous(), back)
        return codes, back
    codes.copy_(quantized(x, factors))
    return codes, _transposed(x, back_factors, back)


@torch.library.custom_op("fxtune::fp8_transpose", mutates_args=())
def fp8_transpose(x: Tensor, factors: Tensor) -> Tensor:
    """The second result of fp8_both() alone."""
    back = _empty_both(x)[1]
    if x.is_cuda:
        from fxtune.kernels import fp8_triton

        x = x if x.stride(1) == 1 else x.contiguous()
        fp8_triton.quantize_both(x, None, None, factors.contiguous(), back)
        return back
    return _transposed(x, factors, back)


def _transposed(x: Tensor, factors: Tensor, back: Tensor) -> Tensor:
    back.view(torch.uint8).zero_()
    back[:, : len(x)].copy_(quantized(x, factors).t())
    return back


def _empty_both(x: Tensor) -> tuple[Tensor, Tensor]:
    rows, width = x.shape
    across = -(-rows // MULTIPLE) * MULTIPLE
    return x.new_empty(rows, width, dtype=E4M3), x.new_empty(width, across, dtype=E4M3)


@fp8_both.register_fake
def _(x: Tensor, factors: Tensor, back_factors: Tensor) -> tuple[Tensor, Tensor]:
    return _empty_both(x)


@fp8_transpose.register_fake
def _(x: Tensor, factors: Tensor) -> Tensor:
    return _empty_both(x)[1]
