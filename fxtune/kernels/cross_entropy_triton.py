"""The Triton kernel of linear_cross_entropy.py: each row's loss, and its logits replaced by their gradient, in one launch.

One program a row. It reads the row once for the maximum and the sum of exponentials (both at once: the sum is rescaled where a
larger logit appears), and once more to write softmax - onehot in place. All arithmetic is float32 whatever the logits' dtype.
Offsets are int64: 65,536 rows of 128k words are beyond int32. Imported only where there is a GPU: triton is no part of torch's
CPU builds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 16384
"""Logits of a row that a program holds at once."""


def softmax_gradient(logits: torch.Tensor, labels: torch.Tensor, losses: torch.Tensor, scale: float, cap: float,
                     gradient: bool) -> None:
    """`logits`: [rows, vocabulary], each row contiguous; `labels`: int64 [rows]; `losses`: float32 [rows], written."""
    rows, vocabulary = logits.shape
    assert (logits.stride(1), labels.stride(), losses.stride()) == (1, (1,), (1,))
    block = min(BLOCK, triton.next_power_of_2(vocabulary))
    _softmax_gradient[(rows,)](logits, logits.stride(0), labels, losses, vocabulary, float(scale), float(cap), CAP=bool(cap),
                               GRADIENT=gradient, BLOCK=block, num_warps=16 if block >= 8192 else 8 if block >= 2048 else 4)


@triton.jit
def _bend(x, scale, cap, CAP: tl.constexpr):
    """The logit as the model means it, and tanh(x / cap). tanh by way of the sigmoid: it is in triton itself everywhere."""
    x = x * scale
    t = x
    if CAP:
        t = 2.0 * tl.sigmoid(2.0 * x / cap) - 1.0
        x = cap * t
    return x, t


@triton.jit
def _softmax_gradient(logits_ptr, stride, labels_ptr, losses_ptr, vocabulary, scale, cap, CAP: tl.constexpr,
                      GRADIENT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    label = tl.load(labels_ptr + row)
    # Before anything is overwritten. A label outside of the vocabulary shows as nan; reading there would be another's memory.
    inside = (label >= 0) & (label < vocabulary)
    target = tl.load(logits_ptr + label, mask=inside, other=float("nan")).to(tl.float32)
    target = _bend(target, scale, cap, CAP)[0]
    columns = tl.arange(0, BLOCK)
    highest = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        at = start + columns
        x = tl.load(logits_ptr + at, mask=at < vocabulary, other=0.0).to(tl.float32)
        x = _bend(x, scale, cap, CAP)[0]
        x = tl.where(at < vocabulary, x, float("-inf"))
        higher = tl.maximum(highest, tl.max(x, 0))
        total = total * tl.exp(highest - higher) + tl.sum(tl.exp(x - higher), 0)
        highest = higher
    # The highest logit is taken off first: differences of large logits are exact, those of their logarithms are not.
    logarithm = tl.log(total)
    tl.store(losses_ptr + row, logarithm - (target - highest))
    if GRADIENT:
        tl.debug_barrier()  # every thread has read its target before one writes over it
        for start in range(0, vocabulary, BLOCK):
            at = start + columns
            x = tl.load(logits_ptr + at, mask=at < vocabulary, other=0.0).to(tl.float32)
            x, t = _bend(x, scale, cap, CAP)
            slope = tl.exp(x - highest - logarithm) - tl.where(at == label, 1.0, 0.0)
            if CAP:
                slope = slope * (1.0 - t * t)
            tl.store(logits_ptr + at, (slope * scale).to(logits_ptr.dtype.element_ty), mask=at < vocabulary)
