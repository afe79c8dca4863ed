"""Triton kernels of fp8_experts.py: quantization of tokens' states, and a grouped GEMM in fp8.

    quantize_tokens   quantizes a token's state once, and writes the codes to the rows of all its experts
    quantize_scaled   quantizes a token's state times the factors of an expert, for weights without a kept transpose
    product           multiplies quantized rows by the matrix of their expert, and adds a product of low rank

_tile_of() of gated_experts_triton.py finds a program's tile of rows. Import this module only on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fxtune.kernels.expert_adapters_triton import low_product
from fxtune.kernels.fp8_triton import _scale
from fxtune.kernels.gated_experts_triton import _grid, _tile_of
from fxtune.kernels.triton_parts import rank_block

PRODUCT: dict[str, int] = dict(ROWS=128, COLUMNS=128, DEPTH=128, num_warps=4, num_stages=3)
"""The launch shape: the fastest of five on an H200, for 131,072 rows of 128 experts."""


def quantize_tokens(states: Tensor, rows: int, back: Tensor, smallest: float) -> tuple[Tensor, Tensor]:
    """See fp8_experts.quantize_tokens()."""
    states, (tokens, width) = states.contiguous(), states.shape
    codes = states.new_empty(rows, width, dtype=torch.float8_e4m3fn)
    scales = states.new_empty(rows, 1, dtype=torch.float32)
    block = triton.next_power_of_2(width)
    if tokens:
        _quantize_tokens[(tokens,)](
            states, back, codes, scales, width, smallest, K=len(back) // tokens, BLOCK=block, num_warps=_warps(block)
        )
    return codes, scales


def quantize_scaled(
    states: Tensor, token: Tensor, factors: Tensor, ends: Tensor, smallest: float
) -> tuple[Tensor, Tensor]:
    """See fp8_experts.quantize_scaled()."""
    states, rows, width = states.contiguous(), len(token), states.shape[1]
    codes = states.new_empty(rows, width, dtype=torch.float8_e4m3fn)
    scales = states.new_empty(rows, 1, dtype=torch.float32)
    row = torch.arange(rows, dtype=ends.dtype, device=ends.device)
    expert = torch.searchsorted(ends, row, right=True, out_int32=True)
    block = triton.next_power_of_2(width)
    if rows:
        _quantize_scaled[(rows,)](
            states, token, expert, factors.contiguous(), codes, scales, width, smallest,
            BLOCK=block, num_warps=_warps(block),
        )  # fmt: skip
    return codes, scales


def product(
    x: Tensor, x_scales: Tensor, codes: Tensor, scales: Tensor, ends: Tensor, low: tuple[Tensor, Tensor] | None
) -> Tensor:
    """fp8_experts.scaled_product() with a result in bfloat16, [rows, out]."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    (rows, depth), (experts, columns, _) = x.shape, codes.shape
    out = torch.empty(rows, columns, dtype=torch.bfloat16, device=x.device)
    narrow, factor = (out, out.unsqueeze(0)) if low is None else (low[0].contiguous(), low[1])
    ranks = narrow.shape[1] if low is not None else 0
    tiles = triton.cdiv(columns, PRODUCT["COLUMNS"])
    block: Any = TensorDescriptor.from_tensor
    _product[(_grid(rows, ends, PRODUCT)[0] * tiles,)](
        block(x.contiguous(), [PRODUCT["ROWS"], PRODUCT["DEPTH"]]),
        block(codes.contiguous().flatten(0, 1), [PRODUCT["COLUMNS"], PRODUCT["DEPTH"]]),
        x_scales, scales.contiguous(), narrow, factor, *factor.stride(), out, ends, columns, depth, ranks, experts,
        LOW=low is not None, RANKS=rank_block(ranks), EXPERTS=triton.next_power_of_2(experts), **PRODUCT,
    )  # fmt: skip
    return out


def _warps(block: int) -> int:
    """The number of warps of a program that holds `block` numbers of a row."""
    return 16 if block > 8192 else 8 if block > 2048 else 4


@triton.jit
def _quantize_tokens(states, back, codes, scales, width, smallest, K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(states + token * width + column, mask=inside, other=0.0).to(tl.float32)
    scale = _scale(tl.max(tl.abs(x), 0), smallest, False)
    code = (x * (1.0 / scale)).to(codes.dtype.element_ty)
    for rank in tl.static_range(K):
        row = tl.load(back + token * K + rank).to(tl.int64)
        tl.store(codes + row * width + column, code, mask=column < tl.where(row >= 0, width, 0))
        tl.store(scales + row, scale, mask=row >= 0)


@triton.jit
def _quantize_scaled(states, token, expert, factors, codes, scales, width, smallest, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    source = tl.load(token + row).to(tl.int64)
    x = tl.load(states + source * width + column, mask=inside, other=0.0).to(tl.float32)
    x *= tl.load(factors + tl.load(expert + row).to(tl.int64) * width + column, mask=inside, other=0.0)
    scale = _scale(tl.max(tl.abs(x), 0), smallest, False)
    tl.store(codes + row * width + column, (x * (1.0 / scale)).to(codes.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale)


@triton.jit
def _product(
    x, codes, x_scales, scales, narrow, factor, by_expert, by_rank, by_column, out, ends,
    columns, depth, ranks, experts,
    LOW: tl.constexpr, RANKS: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """A program computes a tile of one expert. Programs that read the same rows follow each other."""
    across = (columns + COLUMNS - 1) // COLUMNS
    expert, first, end = _tile_of(ends, tl.program_id(0) // across, experts, ROWS, EXPERTS)
    if expert >= experts:
        return
    begin = (tl.program_id(0) % across) * COLUMNS
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for at in range(0, depth, DEPTH):
        # The last tile of an expert also reads rows of the next experts. Their products are not written.
        left = x.load([first, at])
        right = codes.load([expert * columns + begin, at])
        total = tl.dot(left, right.T, total)
    row = first.to(tl.int64) + tl.arange(0, ROWS)[:, None]
    column = begin + tl.arange(0, COLUMNS)[None, :]
    x_scale = tl.load(x_scales + row, mask=row < end, other=0.0)
    scale = tl.load(scales + expert.to(tl.int64) * columns + column, mask=column < columns, other=0.0)
    total = total * x_scale * scale
    if LOW:
        total = low_product(
            narrow, factor, by_expert, by_rank, by_column, expert, row, end, column, columns, ranks, total, RANKS
        )
    tl.store(out + row * columns + column, total.to(out.dtype.element_ty), mask=(row < end) & (column < columns))
