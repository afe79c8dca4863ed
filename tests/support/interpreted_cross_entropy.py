"""Compares the Triton kernel of the cross-entropy with torch."""

from __future__ import annotations

import itertools

import torch

from fxtune.kernels import cross_entropy_triton
from fxtune.kernels.cross_entropy_triton import softmax_gradient
from fxtune.kernels.linear_cross_entropy import _softmax_gradient as plain

cross_entropy_triton.WARPS, cross_entropy_triton.LOADS = 1, 1
torch.manual_seed(0)
compared = 0
kinds = itertools.cycle(itertools.product((torch.float32, torch.bfloat16, torch.float16), (5, 700)))
options = itertools.product(((1.0, 0.0), (0.125, 0.0), (1.0, 30.0), (2.0, 5.0)), (True, False))
for (dtype, words), ((scale, cap), gradient) in zip(kinds, options, strict=False):
    logits, labels = (torch.randn(3, words) * 20).to(dtype), torch.randint(words, (3,))
    labels[1] = -100 if words == 700 else labels[1]
    mine, theirs = torch.empty(3, words + 7, dtype=dtype)[:, :words].copy_(logits), logits.clone()
    losses = torch.empty(2, 3)
    softmax_gradient(mine, labels, losses[0], scale, cap, gradient, -100)
    plain(theirs, labels, losses[1], scale, cap, gradient)
    torch.testing.assert_close(losses[0], losses[1], rtol=2e-6, atol=2e-5)
    torch.testing.assert_close(mine, theirs, rtol=1e-2 if dtype.itemsize == 2 else 1e-5, atol=1e-6)
    compared += 1
logits, losses = torch.full((3, 9), 1e4), torch.empty(3)
logits[0, 3] = 2e4
softmax_gradient(logits, torch.tensor([3, 1, -1]), losses, 1.0, 0.0, True, -100)
assert losses[0] == 0
assert abs(losses[1] - torch.tensor(9.0).log()) < 1e-5
assert losses[2].isnan()
assert logits[:2].isfinite().all()
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    x, factor = torch.randn(3, 3000).to(dtype), torch.tensor(1 / 16380)
    assert torch.equal(cross_entropy_triton.scaled(x, factor), (x.float() * factor).to(dtype))
    compared += 1
print(compared, "compared")
