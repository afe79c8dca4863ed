"""The experts of a mixture over frozen weights in fp8: gated_experts.py with its two wide products in e4m3.

Weights are [experts, out, in], with a scale for each expert and output row; activations have a scale for each row
(fp8.py gives the errors). Each token is quantized once in the forward pass (x) and once in the backward pass (dy), and
its codes are copied to the rows of its k experts. That moves half the bytes of bfloat16, and takes one quantization in
place of k. The kernels of the activation also write the codes of h and dg.

dy W sums over W's output rows, so it needs W^T as a second matrix. As for linears, there are two ways:

- W and W^T are kept, 2 bytes a weight. This is faster.
- Only W is kept. Its scales differ by expert and output row, so each row of dy is multiplied by the scales of its
  expert before it is quantized. Each backward pass transposes the codes.

The adapters' products are not in fp8. r1 = x A1^T and dr2 = dy B2 read the tokens' 16-bit states (`project`), and so
do the gradients of A1 and B2 (`outer_of`). On Hopper the states are read in place, so no 16-bit row is gathered. The
adapters' parts of y and dx are added before rounding, by the Triton GEMM or when a token's rows are added up.

Either the Triton kernel or torch's grouped GEMM computes the wide products. Triton's is the default: for the shapes of
Qwen3-30B-A3B on an H200 it is as fast as torch's in three products and faster in the fourth. Adding the adapter's part
takes 2 to 6 % of its time. quack's kernel is not used: as fxtune calls it, it takes no scales of rows and columns, and
its accumulation of e4m3 products is slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxtune.kernels import fp8, gated_experts
from fxtune.kernels.expert_layer import Layer, register
from fxtune.kernels.fp8 import E4M3, SMALLEST, Weight, quantize_rows
from fxtune.kernels.gated_experts import MOST_RANKS, Adapter, outer_of, project
from fxtune.kernels.grouped_matmul import pick, product, segments
from fxtune.kernels.swiglu import SILU, Activation
from fxtune.upstream import torch as upstream

TORCH, TRITON = "torch", "triton"
"""The grouped GEMMs for fp8: torch's (CUTLASS), and the GEMM of fp8_experts_triton.py. Triton's also adds an adapter's
product. If the adapter's rank is above MOST_RANKS, torch's GEMM is used in its place."""


Rows = tuple[Tensor, Tensor]
"""Quantized rows: e4m3 codes [rows, width] and float32 scales [rows, 1]."""


@torch.no_grad()
def quantize_experts(weight: Tensor, transpose: bool = True) -> Weight:
    """Quantize `weight` [experts, out, in] of any floating dtype. `transpose`: keep the transposes, too; making
    them takes two temporary bfloat16 copies."""
    experts, out, inner = weight.shape
    codes, scales = quantize_rows(weight.reshape(-1, inner), powers=True)
    half = Weight(codes.view(torch.uint8).view(weight.shape), scales.view(experts, out))
    if not transpose:
        return half
    turned = fp8.dequantize_weight(codes, scales, torch.bfloat16).view(weight.shape).mT.reshape(-1, out)
    back, back_scales = quantize_rows(turned, powers=True)
    return Weight(*half[:2], back.view(torch.uint8).view(experts, inner, out), back_scales.view(experts, inner))


def dequantize_experts(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The weights [experts, out, in] in `dtype`."""
    return fp8.dequantize_weight(codes.flatten(0, 1), scales.flatten(), dtype).view(codes.shape)


def fp8_experts(
    hidden: Tensor,
    weights: Tensor,
    order: Tensor,
    back: Tensor,
    ends: Tensor,
    matrices: tuple[Sequence[Tensor | None], Sequence[Tensor | None]],
    adapters: tuple[Adapter, Adapter],
    act: Activation = SILU,
    gemm: str = TRITON,
    keep: bool = True,
) -> Tensor:
    """[tokens, d]: the weighted sum of the outputs of each token's experts, see gated_experts.gated_experts().

    Args:
        matrices: the Weight of gate and up as one, [experts, 2 width, d], and of down, [experts, d, width]. On a GPU
            `hidden` is bfloat16, and width and d are multiples of 16.
        adapters: one for each of the two matrices. A matrix without an adapter has one of rank 0.
        gemm: TORCH or TRITON.
        keep: see gated_experts.gated_experts().
    """
    first, last = ([tensor for tensor in weights_of if tensor is not None] for weights_of in matrices)
    tensors = *adapters[0], *adapters[1], None, None
    options = *act, gemm, "", keep, False
    return _operator(hidden, weights, order, back, ends, first, last, *tensors, *options)[0]


def _forward(layer: Layer) -> tuple[Tensor, ...]:
    last, ends, gemm = layer.last, layer.ends, layer.gemm
    g, r1 = _inner(layer)
    h, r2 = activate(layer, g, r1)
    y, plus = _with_adapter(h, last[:2], r2, layer.b2.mT, ends, gemm)
    return gated_experts.combine(y, layer.back, layer.weights, plus=plus), g, r1, r2


def _backward(layer: Layer, dout: Tensor, g: Tensor, r1: Tensor, r2: Tensor) -> tuple[Any, ...]:
    weights, back, ends, gemm, token = layer.weights, layer.back, layer.ends, layer.gemm, layer.token
    has_transposes, w = len(layer.first) == 4, layer.row_weights
    if not layer.keep:
        g, r1 = _inner(layer)
    dr2 = project(dout, token, layer.b2, ends)
    dy = quantize_tokens(dout, token, back) if has_transposes else quantize_scaled(dout, token, layer.last[1], ends)
    dh = scaled_product(dy, *_transposed(layer.last), ends, dout.dtype, gemm)
    del dy
    factors = None if has_transposes else layer.first[1]
    dg, codes, dr1, dw, wh = activate_backward(layer, g, r1, dh, dr2, w, factors)
    del dh
    r2w = (r2 * w).to(r2.dtype) if layer.keep else product(wh, layer.a2.mT, ends)
    db2 = outer_of(dout, token, r2w, ends)
    da2 = outer_of(wh, None, dr2, ends).mT.contiguous()
    db1 = outer_of(dg, None, r1, ends)
    del dg, wh
    da1 = outer_of(layer.hidden, token, dr1, ends).mT.contiguous()
    dx, plus = _with_adapter(codes, _transposed(layer.first), dr1, layer.a1, ends, gemm)
    dweights = pick(dw, back).view(weights.shape).to(weights.dtype)
    return gated_experts.combine(dx, back, None, weights.shape[1], plus=plus), dweights, da1, db1, da2, db2, []


def _inner(layer: Layer) -> tuple[Tensor, Tensor]:
    """g without its adapter's product, and r1."""
    r1 = project(layer.hidden, layer.token, layer.a1.mT, layer.ends)
    x = quantize_tokens(layer.hidden, layer.token, layer.back)
    return scaled_product(x, layer.first[0], layer.first[1], layer.ends, layer.hidden.dtype, layer.gemm), r1


_operator = register("fp8_experts", _forward, _backward)


def scaled_product(
    x: Rows, codes: Tensor, scales: Tensor, ends: Tensor, dtype: torch.dtype, gemm: str = TORCH, low: Any = None
) -> Tensor:
    """[rows, out] in `dtype`: each row of `x` times the transpose of its expert's matrix.

    Args:
        codes: uint8 [experts, out, in]. scales: float32 [experts, out].
        low: two factors, [rows, r] and [experts, r, out]. Their product is added before rounding (not by TORCH).
    """
    left, left_scales = x
    if left.is_cuda and len(left):
        if gemm == TRITON:
            from fxtune.kernels import fp8_experts_triton

            return fp8_experts_triton.product(left, left_scales, codes.view(E4M3), scales, ends, low)
        return upstream.scaled_grouped_mm(
            left,
            codes.view(E4M3).mT,
            left_scales.view(-1),
            scales,
            offs=ends,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
    out = torch.empty(len(left), codes.shape[1], dtype=dtype, device=left.device)
    for expert, rows in segments(ends):
        scaled = (left[rows].float() @ codes[expert].view(E4M3).float().t()) * left_scales[rows] * scales[expert]
        out[rows] = (scaled if low is None else scaled.addmm(low[0][rows].float(), low[1][expert].float())).to(dtype)
    return out


def _with_adapter(
    x: Rows, weights: Sequence[Tensor], narrow: Tensor, factor: Tensor, ends: Tensor, gemm: str
) -> tuple[Tensor, Tensor | None]:
    """The product of `x` and its experts' `weights` (codes, scales), and the product of `narrow` [rows, r] and
    `factor` [experts, r, out]. The second is None if the first contains it, or if r is 0."""
    codes, scales = weights
    low = (narrow, factor) if narrow.shape[1] else None
    gemm = TORCH if narrow.shape[1] > MOST_RANKS else gemm
    if low is None or gemm == TRITON:
        return scaled_product(x, codes, scales, ends, narrow.dtype, gemm, low), None
    return scaled_product(x, codes, scales, ends, narrow.dtype, gemm), expand(narrow, factor, ends)


def _transposed(weights: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Codes [experts, in, out] and scales [experts, in] of the transposes. If they are not kept, all scales are 1."""
    if len(weights) == 4:
        return weights[2], weights[3]
    back = fp8.turned(weights[0])
    return back, torch.ones(back.shape[:2], device=back.device)


def quantize_tokens(states: Tensor, token: Tensor, back: Tensor) -> Rows:
    """Quantize the state of each row's token. `states`: [tokens, d]; `token`: [rows]; `back`: see
    gated_experts.gather()."""
    if states.is_cuda:
        from fxtune.kernels import fp8_experts_triton

        return fp8_experts_triton.quantize_tokens(states, len(token), back, SMALLEST)
    codes, scales = quantize_rows(states)
    return codes.index_select(0, token), scales.index_select(0, token)


def quantize_scaled(states: Tensor, token: Tensor, factors: Tensor, ends: Tensor) -> Rows:
    """Quantize the state [d] of each row's token, multiplied by the `factors` [experts, d] of the row's expert."""
    if states.is_cuda:
        from fxtune.kernels import fp8_experts_triton

        return fp8_experts_triton.quantize_scaled(states, token, factors, ends, SMALLEST)
    return _quantized(states.index_select(0, token), ends, factors)


def expand(narrow: Tensor, factor: Tensor, ends: Tensor) -> Tensor:
    """[rows, out]: `narrow` [rows, r] times the `factor` [experts, r, out] of its row's expert."""
    if narrow.is_cuda:
        from fxtune.kernels import expert_adapters_triton

        return expert_adapters_triton.expand(narrow, factor, ends)
    return product(narrow, factor, ends)


def activate(layer: Layer, g: Tensor, r1: Tensor) -> tuple[Rows, Tensor]:
    """gated_experts.activate(), but h is quantized."""
    if g.is_cuda:
        from fxtune.kernels import gated_experts_triton

        h, r2 = g.new_empty(len(g), layer.a2.shape[2]), g.new_empty(len(g), layer.a2.shape[1])
        return gated_experts_triton.forward(layer, g, r1, h, r2, SMALLEST), r2
    h, r2 = gated_experts.activate(layer, g, r1)
    return quantize_rows(h), r2


def activate_backward(
    layer: Layer, g: Tensor, r1: Tensor, dh: Tensor, dr2: Tensor, w: Tensor, factors: Tensor | None
) -> tuple[Tensor, Rows, Tensor, Tensor, Tensor]:
    """gated_experts.activate_backward() that also quantizes dg. Returns dg, its codes and scales, dr1, dw, and w h.
    `factors`: float32 [experts, 2 width]. The columns of dg are multiplied by them before dg is quantized."""
    if g.is_cuda:
        from fxtune.kernels import gated_experts_triton

        dg, dr1 = torch.empty_like(g), torch.empty_like(r1)
        dw, wh, codes = gated_experts_triton.backward(layer, g, r1, dh, dr2, w, dg, dr1, SMALLEST, factors)
        return dg, codes, dr1, dw, wh
    dg, dr1, dw, wh = gated_experts.activate_backward(layer, g, r1, dh, dr2, w)
    return dg, _quantized(dg, layer.ends, factors), dr1, dw, wh


def _quantized(x: Tensor, ends: Tensor, factors: Tensor | None) -> Rows:
    if factors is None:
        return quantize_rows(x)
    codes, scales = x.new_empty(x.shape, dtype=E4M3), x.new_empty(len(x), 1, dtype=torch.float32)
    for expert, rows in segments(ends):
        codes[rows], scales[rows] = quantize_rows(x[rows], columns=factors[expert])
    return codes, scales
