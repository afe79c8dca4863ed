"""The trained half of fused LoRA, by torch: packed factors, and gradients summed over tiles of the rows."""

from __future__ import annotations

import torch

from fxtune.kernels.lora_adapters import AdapterGradients, Adapters, add, pack, padded_rank, project


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def adapters() -> Adapters:
    """Two siblings of ranks 2 and 3 over 7 inputs, with biases."""
    a, b = [drawn(2, 7), drawn(3, 7)], [drawn(4, 2), drawn(5, 3)]
    return Adapters(a, b, [drawn(4), drawn(5)], [0.5, 2.0], torch.float32)


def test_rank_is_padded_to_aligned_rows_with_a_column_for_the_bias():
    assert [padded_rank(ranks, bias) for ranks, bias in (([16], False), ([16], True), ([8, 8, 1], False))] == [
        16,
        32,
        32,
    ]


def test_packed_factors_are_scaled_block_diagonal_and_hold_the_bias():
    given = adapters()
    out, rank = sum(given.out_features), given.padded_rank
    a, b = (torch.full(shape, torch.nan) for shape in ((rank, given.in_features), (out, rank)))
    pack(given, a, b)
    x = drawn(6, 7)
    xa = project(x, a.t(), ones=sum(given.ranks))
    plain = [
        s * (x @ lora_a.t() @ lora_b.t()) + c
        for lora_a, lora_b, c, s in zip(given.a, given.b, given.bias, given.scaling, strict=True)
    ]
    torch.testing.assert_close(xa @ b.t(), torch.cat(plain, -1))
    y = drawn(6, 9)
    torch.testing.assert_close(add(y.clone(), xa, b.t()), y + torch.cat(plain, -1))


def test_gradients_summed_over_tiles_equal_autograd():
    given, x, dy = adapters(), drawn(6, 7), drawn(6, 9)
    leaves = [tensor.clone().requires_grad_() for tensor in (*given.a, *given.b)]
    plain = [
        s * (x @ lora_a.t() @ lora_b.t())
        for lora_a, lora_b, s in zip(leaves[:2], leaves[2:], given.scaling, strict=True)
    ]
    expected = torch.autograd.grad(torch.cat(plain, -1), leaves, dy)
    a, b = torch.empty(given.padded_rank, given.in_features), torch.empty(sum(given.out_features), given.padded_rank)
    pack(given, a, b)
    sums = AdapterGradients(given, [True, True])
    for rows in (slice(0, 4), slice(4, 6)):
        sums.add(dy[rows] @ b, x[rows], x[rows] @ a.t(), dy[rows])
    of_a, of_b = sums.gradients()
    for mine, theirs in zip([*of_a, *of_b], expected, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert AdapterGradients(given, [False, False]).gradients() == ([], [])
