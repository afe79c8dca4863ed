"""Packed weights are dequantized as the linears that hold them are."""

from __future__ import annotations

import pytest
import torch

from fxtune.kernels.quantized import int8_weight, unpack
from fxtune.techniques.quantized_modules import dequantized, packed, quantized


@pytest.mark.parametrize(
    ("kind", "library", "double"),
    [
        ("nf4", "bitsandbytes", True),
        ("nf4", "bitsandbytes", False),
        ("nf4", "torchao", True),
        ("int8", "bitsandbytes", True),
        ("int8", "torchao", True),
    ],
)
def test_unpacked_weight_is_the_dequantized_one(kind, library, double):
    pytest.importorskip(library)
    torch.manual_seed(0)
    source = torch.nn.Linear(512, 64)
    made = quantized(source, kind, library, double, torch.float32, torch.device("cpu"))
    out = torch.full((64, 512), torch.nan)
    unpack(made.fxtune_quantized, packed(made), out)
    torch.testing.assert_close(out, dequantized(made), rtol=1e-6, atol=1e-6)
    assert 0 < (out - source.weight).norm() / source.weight.norm() < 0.11


def test_int8_weights_are_scaled_in_float32_and_rounded_once():
    codes, scale = torch.tensor([[127, -3], [1, 0]], dtype=torch.int8), torch.tensor([0.1234567, 1e-3])
    expected = (codes.double() * scale.double()[:, None]).bfloat16()
    assert torch.equal(int8_weight(codes, scale, torch.bfloat16), expected)
