"""A group's frozen weights with its adapters: the products of each kind of weights against plain ones."""

from __future__ import annotations

import pytest
import torch

from fxtune.kernels.frozen_base import DENSE, Dense, augment, is_dense
from fxtune.kernels.lora_adapters import Adapters


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("with_bias", [False, True])
def test_dense_products_equal_plain_linears_with_adapters(with_bias):
    weights, ranks, scaling = [drawn(5, 7), drawn(3, 7)], [2, 4], [0.5, 2.0]
    a, b = (
        [drawn(rank, 7) for rank in ranks],
        [drawn(len(weight), rank) for weight, rank in zip(weights, ranks, strict=True)],
    )
    bias = [drawn(len(weight)) for weight in weights] if with_bias else []
    adapters = Adapters(a, b, bias, scaling, torch.float64)
    base = Dense([augment(weights, ranks, with_bias)], adapters)
    effective = torch.cat(
        [w + s * lora_b @ lora_a for w, lora_a, lora_b, s in zip(weights, a, b, scaling, strict=True)]
    )
    x, dy, residual = drawn(6, 7), drawn(6, 8), drawn(6, 8)
    whole = x @ effective.t() + (torch.cat(bias) if bias else 0)
    torch.testing.assert_close(base.full(x)[0], whole)
    torch.testing.assert_close(base.full(x, residual=residual)[0], whole + residual)
    torch.testing.assert_close(base.full_backward(dy, padded=False)[0], dy @ effective)
    torch.testing.assert_close(base.split(x)[0], x @ torch.cat(weights).t())
    buffer = base.padded_buffer(6)
    torch.testing.assert_close(base.full(buffer.copy_(x), padded=True)[0], whole)


def test_space_for_adapters_is_empty_and_every_row_is_aligned():
    matrix = augment([torch.ones(5, 7), torch.ones(3, 7)], [2, 4], bias=True)
    assert matrix.shape == (8 + 16, 7 + 16)
    assert matrix[:8, :7].eq(1).all()
    assert matrix.sum() == 8 * 7


def test_dense_kinds_are_distinguished_from_quantized_ones():
    assert is_dense(DENSE)
    assert not is_dense("fp8")
    assert not is_dense("nf4")
