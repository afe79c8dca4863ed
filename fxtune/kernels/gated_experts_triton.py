"""Triton kernels of gated_experts.py: tokens to rows and back, and the gated activation with its products of low rank.

A program of the activation takes a tile of rows of one expert and loops over the columns, so each sum over a row (r2,
dr1 and the gradient of the row's weight) stays in registers. Only the device knows how many tiles an expert has. So
each program counts the tiles of all experts to find its own tile. For a few programs no tile is left.

All arithmetic is float32. Offsets of rows are int64. Import this module only on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fxtune.kernels.expert_layer import Layer
from fxtune.kernels.fp8_triton import _scale
from fxtune.kernels.triton_parts import activation, matrix, rank_block

COLUMNS = 2048
"""Numbers of a row that one program of scatter() and add_up() takes."""
CLEARED, CLEARING = 4096, 32
"""CLEARED: numbers that a program of clear_empty() writes at a time. CLEARING: programs for each expert."""
FORWARD = dict(ROWS=64, COLUMNS=64, num_warps=4, num_stages=3)
BACKWARD = dict(ROWS=64, COLUMNS=64, num_warps=4, num_stages=3)
"""Launches of the activation's kernels: the fastest of 60 forward and 54 backward launches on an H200,
for 131,072 rows of 768 columns."""

Codes = tuple[Tensor, Tensor]
"""e4m3 codes [rows, width] and float32 scales [rows, 1], as fp8.quantize_rows() returns them."""
IEEE = tl.constexpr("ieee")
"""The precision of float32 products: no rounding to TF32."""


def scatter(states: Tensor, back: Tensor, out: Tensor) -> Tensor:
    """Write each of `states` [tokens, d] to its rows of `out` [rows, d]. `back` [tokens k] has the numbers of each
    token's k rows, or -1 for no row."""
    tokens, width = states.shape
    block = min(triton.next_power_of_2(width), COLUMNS)
    if tokens:
        grid = tokens, triton.cdiv(width, block)
        _scatter[grid](*map(matrix, (states.contiguous(), out)), back, width, K=len(back) // tokens, BLOCK=block)
    return out


def add_up(
    rows: Tensor,
    back: Tensor,
    weights: Tensor | None,
    k: int,
    bias: Tensor | None = None,
    expert: Tensor | None = None,
    plus: Tensor | None = None,
) -> Tensor:
    """[tokens, d]: the sum of each token's k rows, multiplied by `weights` [tokens, k] if given. Before that, the
    `bias` [experts, d] of a row's `expert` [tokens k], and a row of `plus`, are added to the row."""
    width = rows.shape[1]
    out = rows.new_empty(len(back) // k, width)
    block = min(triton.next_power_of_2(width), COLUMNS)
    if len(out):
        options = [rows if option is None else option.contiguous() for option in (weights, bias, expert)]
        _add_up[len(out), triton.cdiv(width, block)](
            *map(matrix, (rows, out, rows if plus is None else plus)), back, *options, width,
            K=k, BLOCK=block, WEIGHTED=weights is not None, BIASED=bias is not None, PLUS=plus is not None,
        )  # fmt: skip
    return out


def clear_empty(matrices: Tensor, ends: Tensor) -> None:
    """Fill the matrix of each expert without a row with zeros. `matrices` [experts, in, out] is contiguous. The
    matrices of other experts are not touched, so this takes no time where every expert has a row."""
    _clear_empty[len(ends), CLEARING](matrices, ends, matrices[0].numel(), BLOCK=CLEARED)


def forward(layer: Layer, g: Tensor, r1: Tensor, h: Tensor, r2: Tensor, smallest: float = 0.0) -> Codes:
    """Write `h` and `r2`, see gated_experts.activate(), and return the codes of h. `smallest`: the smallest scale of
    the codes. 0: no codes are made."""
    rows, width = h.shape
    codes, scales = _codes(h, bool(smallest))
    _forward[_grid(rows, layer.ends, FORWARD)](
        *map(matrix, (g, r1, h, r2, codes)), scales, *_factors(layer, g), layer.ends, smallest, *_sizes(layer, width),
        QUANTIZED=bool(smallest), **_constants(layer), **FORWARD,
    )  # fmt: skip
    return codes, scales


def backward(
    layer: Layer, g: Tensor, r1: Tensor, dh: Tensor, dr2: Tensor, w: Tensor, dg: Tensor, dr1: Tensor,
    smallest: float = 0.0, factors: Tensor | None = None,
) -> tuple[Tensor, Tensor, Codes]:  # fmt: skip
    """Write `dg` and `dr1`, and return the gradient of w and w h, see gated_experts.activate_backward(). `smallest`:
    see forward(), but for the codes of dg. `factors`: float32 [experts, 2 width]; the columns of dg are multiplied by
    them before dg is quantized."""
    rows, width = dh.shape
    dw, wh = w.new_empty(rows, dtype=torch.float32), torch.empty_like(dh)
    codes, scales = _codes(dg, bool(smallest))
    _backward[_grid(rows, layer.ends, BACKWARD)](
        *map(matrix, (g, r1, dh, wh, dr2, dg, dr1, codes)), scales, *_factors(layer, g), w.float().contiguous(), dw,
        scales if factors is None else factors.contiguous(), layer.ends, smallest, *_sizes(layer, width),
        QUANTIZED=bool(smallest), SCALED=factors is not None, **_constants(layer), **BACKWARD,
    )  # fmt: skip
    return dw, wh, (codes, scales)


def _codes(x: Tensor, needed: bool) -> Codes:
    """Uninitialized codes and scales for `x` [rows, width]; if they are not `needed`, placeholders."""
    if not needed:
        return x, x
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), x.new_empty(len(x), 1, dtype=torch.float32)


def _factors(layer: Layer, g: Tensor) -> tuple[Tensor, ...]:
    """B1, A2 and the bias of gate and up; without a bias `g` is a placeholder."""
    return layer.b1.contiguous(), layer.a2.contiguous(), g if layer.bias1 is None else layer.bias1.contiguous()


def _constants(layer: Layer) -> dict[str, Any]:
    """The constants that an activation kernel is compiled for. Sizes are rounded up to powers of two, as Triton wants
    them; ranks to at least 16, for tensor cores."""
    act, (r1, r2) = layer.activation, (layer.b1.shape[2], layer.a2.shape[1])
    kind = dict(SILU=act.name == "silu", ALPHA=act.alpha, LIMIT=act.limit, SHIFT=act.shift)
    blocks = dict(R1=rank_block(r1), R2=rank_block(r2), EXPERTS=triton.next_power_of_2(len(layer.ends)))
    return dict(**kind, INTERLEAVED=act.interleaved, BIASED=layer.bias1 is not None, **blocks)


def _grid(rows: int, ends: Tensor, launch: dict[str, int]) -> tuple[int]:
    """A program for each tile that can exist. (The last tile of each expert may be partly empty.)"""
    return (triton.cdiv(rows, launch["ROWS"]) + len(ends),)


def _sizes(layer: Layer, width: int) -> tuple[int, ...]:
    return width, layer.b1.shape[2], layer.a2.shape[1], len(layer.ends)


@triton.jit
def _scatter(states, out, back, width, K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(states[0] + token * states[1] + column, mask=inside)
    for rank in tl.static_range(K):
        row = tl.load(back + token * K + rank).to(tl.int64)
        tl.store(out[0] + row * out[1] + column, value, mask=column < tl.where(row >= 0, width, 0))


@triton.jit
def _add_up(
    rows, out, plus, back, weights, bias, expert, width,
    K: tl.constexpr, BLOCK: tl.constexpr, WEIGHTED: tl.constexpr, BIASED: tl.constexpr, PLUS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(K):
        row = tl.load(back + token * K + rank).to(tl.int64)
        exists = column < tl.where(row >= 0, width, 0)
        value = tl.load(rows[0] + row * rows[1] + column, mask=exists, other=0.0).to(tl.float32)
        if BIASED:
            at = bias + tl.load(expert + token * K + rank).to(tl.int64) * width + column
            value += tl.load(at, mask=inside, other=0.0).to(tl.float32)
        if PLUS:
            value += tl.load(plus[0] + row * plus[1] + column, mask=exists, other=0.0).to(tl.float32)
        if WEIGHTED:
            value *= tl.load(weights + token * K + rank).to(tl.float32)
        total += value
    tl.store(out[0] + token * out[1] + column, total.to(out[0].dtype.element_ty), mask=inside)


@triton.jit
def _clear_empty(matrices, ends, size, BLOCK: tl.constexpr):
    expert = tl.program_id(0)
    end = tl.load(ends + expert)
    if end == tl.load(ends + expert - 1, mask=expert > 0, other=0):
        first = matrices + expert.to(tl.int64) * size
        for start in range(tl.program_id(1) * BLOCK, size, tl.num_programs(1) * BLOCK):
            at = start + tl.arange(0, BLOCK)
            tl.store(first + at, tl.zeros((BLOCK,), matrices.dtype.element_ty), mask=at < size)


@triton.jit
def _tile_of(ends, tile, experts, ROWS: tl.constexpr, EXPERTS: tl.constexpr):
    """The expert of a tile (`experts` if there is no such tile), the tile's first row, and the row after the expert's
    last row."""
    index = tl.arange(0, EXPERTS)
    end = tl.load(ends + index, mask=index < experts, other=0)
    start = tl.load(ends + index - 1, mask=(index > 0) & (index < experts), other=0)
    tiles = tl.where(index < experts, (end - start + ROWS - 1) // ROWS, 0)
    tiles_so_far = tl.cumsum(tiles, 0)
    expert = tl.sum(((tiles_so_far <= tile) & (index < experts)).to(tl.int32), 0)
    is_expert = index == expert
    before = tl.sum(tl.where(is_expert, tiles_so_far - tiles, 0), 0)
    first = tl.sum(tl.where(is_expert, start, 0), 0) + (tile - before) * ROWS
    return expert, first, tl.sum(tl.where(is_expert, end, 0), 0)


@triton.jit
def _factor(factor, row, width, ranks, column, rank):
    """Rows of an expert's B1, transposed: [R, COLUMNS]. `factor` points to B1 [rows, ranks]."""
    at = factor + row.to(tl.int64) * ranks + rank
    return tl.load(at, mask=(column < width) & (rank < ranks), other=0.0)


@triton.jit
def _read_pair(line, start, width, inside, COLUMNS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Numbers of g as they are stored, for _pair_of(). `line` [ROWS, 1]: pointers to the rows of g. `inside`
    [ROWS, 1]: whether a row exists. The caller reads an iteration ahead, because Triton does not pipeline these
    loads."""
    if INTERLEAVED:
        column = 2 * start + tl.arange(0, 2 * COLUMNS)[None, :]
        pairs = tl.load(line + column, mask=inside & (column < 2 * width), other=0.0)
        return pairs, pairs
    else:
        column = start + tl.arange(0, COLUMNS)[None, :]
        gate = tl.load(line + column, mask=inside & (column < width), other=0.0)
        return gate, tl.load(line + width + column, mask=inside & (column < width), other=0.0)


@triton.jit
def _pair_of(
    read, bias, start, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INTERLEAVED: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """gate and up [ROWS, COLUMNS] of the columns from `start`, as float32, with the bias."""
    if INTERLEAVED:
        column = 2 * start + tl.arange(0, 2 * COLUMNS)[None, :]
        gate, up = tl.split(
            tl.reshape(_biased(read[0], bias + column, column < 2 * width, BIASED), (ROWS, COLUMNS, 2))
        )
    else:
        column = start + tl.arange(0, COLUMNS)[None, :]
        gate = _biased(read[0], bias + column, column < width, BIASED)
        up = _biased(read[1], bias + width + column, column < width, BIASED)
    return gate, up


@triton.jit
def _biased(value, bias, exists, BIASED: tl.constexpr):
    value = value.to(tl.float32)
    if BIASED:
        value += tl.load(bias, mask=exists, other=0.0).to(tl.float32)
    return value


@triton.jit
def _store_pair(
    line, gate, up, start, width, inside, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """Write gate and up to the places from which _read_pair() reads them."""
    if INTERLEAVED:
        column = 2 * start + tl.arange(0, 2 * COLUMNS)[None, :]
        pairs = tl.reshape(tl.join(gate, up), (ROWS, 2 * COLUMNS))
        tl.store(line + column, pairs, mask=inside & (column < 2 * width))
    else:
        column = start + tl.arange(0, COLUMNS)[None, :]
        tl.store(line + column, gate, mask=inside & (column < width))
        tl.store(line + width + column, up, mask=inside & (column < width))


@triton.jit
def _gated(gate, up, SILU: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr):
    """h and its derivatives with respect to gate and up."""
    if LIMIT > 0:
        within = (gate <= LIMIT).to(tl.float32), (tl.abs(up) <= LIMIT).to(tl.float32)
        gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)  # else NaN would become the limit
        up = tl.maximum(up, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        value, slope = activation(gate * ALPHA, SILU)
        value, up = value * (1 / ALPHA), up + SHIFT
        return value * up, slope * up * within[0], value * within[1]
    else:
        value, slope = activation(gate * ALPHA, SILU)
        value, up = value * (1 / ALPHA), up + SHIFT
        return value * up, slope * up, value


@triton.jit
def _forward(
    g, r1, h, r2, codes, scales, b1, a2, bias, ends,
    smallest, width, ranks1, ranks2, experts,
    QUANTIZED: tl.constexpr, SILU: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr,
    INTERLEAVED: tl.constexpr, BIASED: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr, EXPERTS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    expert, first, end = _tile_of(ends, tl.program_id(0), experts, ROWS, EXPERTS)
    if expert >= experts:
        return
    rows = first.to(tl.int64) + tl.arange(0, ROWS)
    row = rows[:, None]
    rank1, rank2 = tl.arange(0, R1), tl.arange(0, R2)
    low = tl.load(r1[0] + row * r1[1] + rank1[None, :], mask=(row < end) & (rank1[None, :] < ranks1), other=0.0)
    total, largest = tl.zeros((ROWS, R2), tl.float32), tl.zeros((ROWS,), tl.float32)
    a2 += expert.to(tl.int64) * ranks2 * width
    b1 += expert.to(tl.int64) * 2 * width * ranks1
    bias += expert.to(tl.int64) * 2 * width
    STEP: tl.constexpr = 2 if INTERLEAVED else 1  # the distance between two columns of gate
    to_up = 1 if INTERLEAVED else width
    line = g[0] + row * g[1]
    ahead = _read_pair(line, 0, width, row < end, COLUMNS, INTERLEAVED)
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, :]
        inside = (row < end) & (column < width)
        read = ahead
        ahead = _read_pair(line, start + COLUMNS, width, row < end, COLUMNS, INTERLEAVED)
        gate, up = _pair_of(read, bias, start, width, ROWS, COLUMNS, INTERLEAVED, BIASED)
        gate_column = column * STEP
        b_gate = _factor(b1, gate_column, width, ranks1, column, rank1[:, None])
        b_up = _factor(b1, gate_column + to_up, width, ranks1, column, rank1[:, None])
        gate = tl.dot(low, b_gate, gate, input_precision="ieee")
        up = tl.dot(low, b_up, up, input_precision="ieee")
        value, _, _ = _gated(gate, up, SILU, ALPHA, LIMIT, SHIFT)
        p = value.to(h[0].dtype.element_ty)
        tl.store(h[0] + row * h[1] + column, p, mask=inside)
        if QUANTIZED:
            largest = tl.maximum(largest, tl.max(tl.abs(p.to(tl.float32)), 1))
        a = tl.load(
            a2 + rank2[:, None].to(tl.int64) * width + column,
            mask=(rank2[:, None] < ranks2) & (column < width),
            other=0.0,
        )
        total = tl.dot(p, tl.trans(a), total, input_precision=IEEE) + 0.0  # + 0.0: see swiglu_reduce_triton.py
    narrow = (row < end) & (rank2[None, :] < ranks2)
    tl.store(r2[0] + row * r2[1] + rank2[None, :], total.to(r2[0].dtype.element_ty), mask=narrow)
    if QUANTIZED:
        scale = _scale(largest, smallest, False)
        tl.store(scales + rows, scale, mask=rows < end)
        _write_codes(h, codes, row, end, width, (1.0 / scale)[:, None], scales, False, COLUMNS)


@triton.jit
def _write_codes(x, codes, row, end, width, inverse_scale, factors, SCALED: tl.constexpr, COLUMNS: tl.constexpr):
    """Write x times `inverse_scale` as e4m3 after all threads have written x. The tile is still in the cache."""
    tl.debug_barrier()
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, :]
        inside = (row < end) & (column < width)
        value = tl.load(x[0] + row * x[1] + column, mask=inside, other=0.0).to(tl.float32)
        if SCALED:
            value *= tl.load(factors + column, mask=column < width, other=0.0)
        tl.store(
            codes[0] + row * codes[1] + column, (value * inverse_scale).to(codes[0].dtype.element_ty), mask=inside
        )


@triton.jit
def _backward(
    g, r1, dh, wh, dr2, dg, dr1, codes, scales, b1, a2, bias, weights, dw, factors, ends,
    smallest, width, ranks1, ranks2, experts,
    QUANTIZED: tl.constexpr, SCALED: tl.constexpr, SILU: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    SHIFT: tl.constexpr, INTERLEAVED: tl.constexpr, BIASED: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr,
    EXPERTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    expert, first, end = _tile_of(ends, tl.program_id(0), experts, ROWS, EXPERTS)
    if expert >= experts:
        return
    rows = first.to(tl.int64) + tl.arange(0, ROWS)
    row = rows[:, None]
    rank1, rank2 = tl.arange(0, R1), tl.arange(0, R2)
    narrow1 = (row < end) & (rank1[None, :] < ranks1)
    low = tl.load(r1[0] + row * r1[1] + rank1[None, :], mask=narrow1, other=0.0)
    above = tl.load(dr2[0] + row * dr2[1] + rank2[None, :], mask=(row < end) & (rank2[None, :] < ranks2), other=0.0)
    w = tl.load(weights + rows, mask=rows < end, other=0.0)
    total, dw_sum = tl.zeros((ROWS, R1), tl.float32), tl.zeros((ROWS,), tl.float32)
    largest = tl.zeros((ROWS,), tl.float32)
    factors += expert.to(tl.int64) * 2 * width
    a2 += expert.to(tl.int64) * ranks2 * width
    b1 += expert.to(tl.int64) * 2 * width * ranks1
    bias += expert.to(tl.int64) * 2 * width
    STEP: tl.constexpr = 2 if INTERLEAVED else 1
    to_up = 1 if INTERLEAVED else width
    kind = dg[0].dtype.element_ty
    line, first_column = g[0] + row * g[1], tl.arange(0, COLUMNS)[None, :]
    ahead = _read_pair(line, 0, width, row < end, COLUMNS, INTERLEAVED)
    dh_ahead = tl.load(dh[0] + row * dh[1] + first_column, mask=(row < end) & (first_column < width), other=0.0)
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, :]
        inside = (row < end) & (column < width)
        dh_at = dh[0] + row * dh[1] + column
        read, d_h = ahead, dh_ahead.to(tl.float32)
        ahead = _read_pair(line, start + COLUMNS, width, row < end, COLUMNS, INTERLEAVED)
        dh_ahead = tl.load(dh_at + COLUMNS, mask=(row < end) & (column + COLUMNS < width), other=0.0)
        gate, up = _pair_of(read, bias, start, width, ROWS, COLUMNS, INTERLEAVED, BIASED)
        gate_column = column * STEP
        b_gate = _factor(b1, gate_column, width, ranks1, column, rank1[:, None])
        b_up = _factor(b1, gate_column + to_up, width, ranks1, column, rank1[:, None])
        a = tl.load(
            a2 + rank2[:, None].to(tl.int64) * width + column,
            mask=(rank2[:, None] < ranks2) & (column < width),
            other=0.0,
        )
        gate, up, d_h = (
            tl.dot(low, b_gate, gate, input_precision=IEEE),
            tl.dot(low, b_up, up, input_precision=IEEE),
            tl.dot(above, a, d_h, input_precision=IEEE),
        )
        p, by_gate, by_up = _gated(gate, up, SILU, ALPHA, LIMIT, SHIFT)
        dw_sum += tl.sum(d_h * p, 1)
        d_h *= w[:, None]
        d_gate, d_up = (d_h * by_gate).to(kind), (d_h * by_up).to(kind)
        _store_pair(dg[0] + row * dg[1], d_gate, d_up, start, width, row < end, ROWS, COLUMNS, INTERLEAVED)
        if QUANTIZED:
            gate_size, up_size = tl.abs(d_gate.to(tl.float32)), tl.abs(d_up.to(tl.float32))
            if SCALED:
                gate_size *= tl.load(factors + gate_column, mask=column < width, other=0.0)
                up_size *= tl.load(factors + gate_column + to_up, mask=column < width, other=0.0)
            largest = tl.maximum(largest, tl.max(tl.maximum(gate_size, up_size), 1))
        total = tl.dot(d_gate, tl.trans(b_gate), total, input_precision=IEEE)
        total = tl.dot(d_up, tl.trans(b_up), total, input_precision=IEEE) + 0.0
        tl.store(wh[0] + row * wh[1] + column, (p * w[:, None]).to(kind), mask=inside)
    tl.store(dr1[0] + row * dr1[1] + rank1[None, :], total.to(dr1[0].dtype.element_ty), mask=narrow1)
    tl.store(dw + rows, dw_sum, mask=rows < end)
    if QUANTIZED:
        scale = _scale(largest, smallest, False)
        tl.store(scales + rows, scale, mask=rows < end)
        _write_codes(dg, codes, row, end, 2 * width, (1.0 / scale)[:, None], factors, SCALED, COLUMNS)
