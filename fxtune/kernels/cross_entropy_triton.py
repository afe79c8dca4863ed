"""Triton kernel of linear_cross_entropy.py: computes each row's loss and replaces the row's logits by their gradient.

One program handles a row. It reads the row for the maximum and the sum of exponentials. It then goes backwards from
the end of the row, which is still in the cache, and writes softmax - onehot in place. All arithmetic is float32,
whatever the logits' dtype.

The kernel should cost three passes over memory and nothing else, so loads must not wait for each other. Each thread
keeps a maximum and a sum for each of its LOADS loads. The maxima and sums of all threads are combined once, at the end
of the row. Combining them after each block would stall all threads eight times a row.

Offsets are int64: 65,536 rows of a vocabulary of 128k exceed int32. Import this module only on a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WARPS = 32
"""The most warps of a program. A small vocabulary uses fewer."""
BLOCK = 4096
"""Numbers that one program of scaled() multiplies."""
LOADS = 2
"""Loads of 16 bytes that a thread has in flight."""


def softmax_gradient(
    logits: Tensor, labels: Tensor, losses: Tensor, scale: float, cap: float, gradient: bool, ignored: int
) -> None:
    """Write each row's loss to `losses` [rows], float32. With `gradient`, replace its logits by the loss's gradient.

    `logits`: [rows, vocabulary], each row contiguous; `labels`: int64 [rows]. A row with the label `ignored` gets
    zeros as loss and gradient, and its logits are not read.
    """
    rows, vocabulary = logits.shape
    assert (logits.stride(1), labels.stride(), losses.stride()) == (1, (1,), (1,))
    if not rows:
        return
    per_load = 16 // logits.element_size()
    needed = triton.next_power_of_2(triton.cdiv(vocabulary, per_load))
    lanes = min(WARPS * 32 * LOADS, needed)
    _softmax_gradient[(rows,)](
        logits, logits.stride(0), labels, losses, vocabulary, float(scale), float(cap),
        CAP=bool(cap), SCALED=scale != 1.0, GRADIENT=gradient, IGNORED=ignored, LANES=lanes, PER_LOAD=per_load,
        num_warps=min(WARPS, max(lanes // 32, 1)),
    )  # fmt: skip


def scaled(x: Tensor, factor: Tensor) -> Tensor:
    """x * factor in x's dtype, multiplied in float32. `x` is contiguous, and `factor` is one number on the device."""
    assert x.is_contiguous()
    assert factor.numel() == 1
    out = torch.empty_like(x)
    if x.numel():
        _scaled[(triton.cdiv(x.numel(), BLOCK),)](x, factor, out, x.numel(), BLOCK=BLOCK, num_warps=8)
    return out


@triton.jit
def _scaled(x_ptr, factor_ptr, out_ptr, numbers, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < numbers, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, (x * tl.load(factor_ptr).to(tl.float32)).to(out_ptr.dtype.element_ty), mask=at < numbers)


@triton.jit
def _scale_and_cap(x, scale, cap, CAP: tl.constexpr, SCALED: tl.constexpr):
    """The scaled and capped logit, and with CAP tanh(x / cap), from the sigmoid: not every Triton has tanh."""
    if SCALED:
        x = x * scale
    t = x
    if CAP:
        t = 2.0 * tl.sigmoid(2.0 * x / cap) - 1.0
        x = cap * t
    return x, t


@triton.jit
def _fold(x, highest, total):
    """Update each lane's maximum, and its sum of exp(x - maximum), with the numbers x [LANES, PER_LOAD]."""
    higher = tl.maximum(highest, tl.max(x, 1))
    return higher, total * tl.exp(highest - higher) + tl.sum(tl.exp(x - higher[:, None]), 1)


@triton.jit
def _slope(x, highest, share, scale, cap, CAP: tl.constexpr, SCALED: tl.constexpr):
    """The gradient of each logit except the label's: its softmax times the derivative of scale and cap."""
    x, t = _scale_and_cap(x.to(tl.float32), scale, cap, CAP, SCALED)
    slope = tl.exp(x - highest) * share
    if CAP:
        slope = slope * (1.0 - t * t)
    return slope


@triton.jit
def _softmax_gradient(
    logits_ptr, stride, labels_ptr, losses_ptr, vocabulary, scale, cap,
    CAP: tl.constexpr, SCALED: tl.constexpr, GRADIENT: tl.constexpr, IGNORED: tl.constexpr, LANES: tl.constexpr,
    PER_LOAD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    label = tl.load(labels_ptr + row)
    BLOCK: tl.constexpr = LANES * PER_LOAD
    columns = tl.arange(0, LANES)[:, None] * PER_LOAD + tl.arange(0, PER_LOAD)[None, :]
    full = vocabulary // BLOCK * BLOCK
    tail = full + columns
    kind = logits_ptr.dtype.element_ty
    if label == IGNORED:
        tl.store(losses_ptr + row, 0.0)
        if GRADIENT:
            zeros = tl.zeros((LANES, PER_LOAD), kind)
            for start in range(0, full, BLOCK):
                tl.store(logits_ptr + start + columns, zeros)
            tl.store(logits_ptr + tail, zeros, mask=tail < vocabulary)
    else:
        # The label's logit, read before the row is overwritten. A label outside of the vocabulary gives nan.
        inside = (label >= 0) & (label < vocabulary)
        target = tl.load(logits_ptr + label, mask=inside, other=float("nan")).to(tl.float32)
        target, tanh = _scale_and_cap(target, scale, cap, CAP, SCALED)
        highest = tl.full((LANES,), -3.0e38, tl.float32)  # a lane without logits keeps it; -inf - -inf is nan
        total = tl.zeros((LANES,), tl.float32)
        for start in range(0, full, BLOCK):
            x = tl.load(logits_ptr + start + columns, eviction_policy="evict_last").to(tl.float32)
            highest, total = _fold(_scale_and_cap(x, scale, cap, CAP, SCALED)[0], highest, total)
        if full < vocabulary:
            x = tl.load(logits_ptr + tail, mask=tail < vocabulary, other=0.0).to(tl.float32)
            x = tl.where(tail < vocabulary, _scale_and_cap(x, scale, cap, CAP, SCALED)[0], float("-inf"))
            highest, total = _fold(x, highest, total)
        top = tl.max(highest, 0)
        denominator = tl.sum(total * tl.exp(highest - top), 0)
        # target - top is exact for large logits. The difference of target and log(denominator) + top would not be.
        tl.store(losses_ptr + row, tl.log(denominator) - (target - top))
        if GRADIENT:
            share = scale / denominator
            tl.debug_barrier()  # all threads read the label's logit before any thread overwrites it
            if full < vocabulary:
                x = tl.load(logits_ptr + tail, mask=tail < vocabulary, other=0.0)
                tl.store(
                    logits_ptr + tail, _slope(x, top, share, scale, cap, CAP, SCALED).to(kind), mask=tail < vocabulary
                )
            for start in range(0, full, BLOCK):
                at = logits_ptr + (full - BLOCK - start) + columns
                x = tl.load(at, eviction_policy="evict_first")
                tl.store(at, _slope(x, top, share, scale, cap, CAP, SCALED).to(kind))
            tl.debug_barrier()  # the row is written, and the gradient of the label replaces a number in it
            label_gradient = (tl.exp(target - top) / denominator - 1.0) * scale
            if CAP:
                label_gradient = label_gradient * (1.0 - tanh * tanh)
            tl.store(logits_ptr + label, label_gradient.to(kind), mask=inside)
