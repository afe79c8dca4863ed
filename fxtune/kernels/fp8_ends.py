"""The two ends of a model in fp8: token embeddings, for memory, and the output head, for speed and memory.

Both are frozen matrices of [vocabulary, width] with a scale to each row, so where a model has one matrix for both, they share
the codes. An embedding is dequantised row by row as it is read. The head's logits are a product in fp8 of hidden states that are
quantised row by row. The gradient of the hidden states is a product in the compute dtype with the dequantised weight, made
anew in each call: softmax over a vocabulary of 128k has most of its numbers near 1e-6 next to one near 1, which is
what e4m3 cannot hold, and dropping them would push all hidden states the same way.

The logits' rounding is noise of about 0.04 of their size and shows in the loss that is reported, also in that of an evaluation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxtune.kernels.fp8 import E4M3, dequantize_weight, quantize_rows, scaled_mm


class Fp8Embedding(nn.Embedding):
    """nn.Embedding of codes. Answers in `compute_dtype`."""

    compute_dtype: torch.dtype
    scales: Tensor

    def forward(self, input: Tensor) -> Tensor:
        codes, scales = F.embedding(input, self.weight), F.embedding(input, self.scales.view(-1, 1))
        return (codes.view(E4M3).to(torch.float32) * scales).to(self.compute_dtype)


class Fp8Head(nn.Linear):
    """nn.Linear whose product is in fp8, and whose gradient is not. Answers in the input's dtype."""

    compute_dtype: torch.dtype
    scales: Tensor

    def forward(self, input: Tensor) -> Tensor:
        output = torch.ops.fxtune.fp8_head(input.to(self.compute_dtype), self.weight.t(), self.scales)
        return (output if self.bias is None else output + self.bias).to(input.dtype)


@torch.no_grad()
def head_of(
    linear: nn.Linear, compute: torch.dtype, device: torch.device, shared: Fp8Embedding | None = None
) -> Fp8Head:
    """A frozen head on `device` for `linear`, which is left as it is. `shared`: an embedding of the same matrix."""
    made = Fp8Head(linear.in_features, linear.out_features, bias=False, device="meta")
    bias = linear.bias
    made.bias = None if bias is None else nn.Parameter(bias.detach().to(device, compute), requires_grad=False)
    return _holding(made, linear.weight, compute, device, shared)


@torch.no_grad()
def embedding_of(embedding: nn.Embedding, compute: torch.dtype, device: torch.device) -> Fp8Embedding:
    """Frozen embeddings on `device` for `embedding`, which is left as it is."""
    made = Fp8Embedding(embedding.num_embeddings, embedding.embedding_dim, device="meta")
    made.padding_idx = embedding.padding_idx
    return _holding(made, embedding.weight, compute, device, None)


def end_bytes(module: Fp8Embedding | Fp8Head) -> int:
    """Bytes of the codes and scales."""
    return sum(one.numel() * one.element_size() for one in (module.weight, module.scales))


def _holding(
    made: Any, weight: Tensor, compute: torch.dtype, device: torch.device, shared: Fp8Embedding | None
) -> Any:
    if shared is None:
        codes, scales = quantize_rows(weight.detach().to(device), powers=True)
        made.weight = nn.Parameter(codes.view(torch.uint8), requires_grad=False)
        made.register_buffer("scales", scales.view(1, -1), persistent=False)
    else:
        made.weight = shared.weight
        made.register_buffer("scales", shared.scales, persistent=False)
    made.compute_dtype = compute
    return made


@torch.library.custom_op("fxtune::fp8_head", mutates_args=())
def fp8_head(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """x times `weight`, [..., width] and the codes [width, vocabulary], each column contiguous."""
    rows = x.detach().flatten(0, -2)
    return scaled_mm(quantize_rows(rows), weight.t(), scales).to(x.dtype).view(*x.shape[:-1], weight.shape[1])


@fp8_head.register_fake
def _(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[1])


def _setup(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    weight, scales = ctx.saved_tensors
    return gradient @ dequantize_weight(weight.t(), scales, gradient.dtype), None, None


fp8_head.register_autograd(_backward, setup_context=_setup)
