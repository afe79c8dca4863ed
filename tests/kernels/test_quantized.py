"""Packed weights are dequantized as the linears that hold them are."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.quantized import kinds

from fxtune.kernels.quantized import E2M1, MX_BLOCK, MXFP4, int8_weight, pack_mxfp4, unpack
from fxtune.techniques.quantized_modules import dequantized, packed, quantized


@kinds
def test_unpacked_weight_is_the_dequantized_one(kind):
    torch.manual_seed(0)
    source = torch.nn.Linear(512, 64)
    made = quantized(source, kind, torch.float32, torch.device("cpu"))
    out = torch.full((64, 512), torch.nan)
    unpack(made.stored_as, packed(made), out)
    torch.testing.assert_close(out, dequantized(made), rtol=1e-6, atol=1e-6)
    assert 0 < (out - source.weight).norm() / source.weight.norm() < 0.11


def test_int8_weights_are_scaled_in_float32_and_rounded_once():
    codes, scale = torch.tensor([[127, -3], [1, 0]], dtype=torch.int8), torch.tensor([0.1234567, 1e-3])
    expected = (codes.double() * scale.double()[:, None]).bfloat16()
    assert torch.equal(int8_weight(codes, scale, torch.bfloat16), expected)


def unpacked(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    out = torch.full((*codes.shape[:2], scales.shape[2] * MX_BLOCK), torch.nan, dtype=dtype)
    unpack(MXFP4, [codes, scales], out.flatten(0, 1))
    return out


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 3), st.integers(1, 40), st.integers(1, 3), st.sampled_from([torch.float32, torch.bfloat16]))
def test_mxfp4_is_unpacked_to_the_numbers_that_transformers_gives(experts, rows, blocks, dtype):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    codes = torch.randint(256, (experts, rows, blocks, 16), dtype=torch.uint8)
    scales = torch.randint(60, 190, (experts, rows, blocks), dtype=torch.uint8)
    theirs = convert_moe_packed_tensors(codes, scales, dtype=dtype).mT
    assert torch.equal(unpacked(codes.flatten(2), scales, dtype), theirs)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 3), st.integers(1, 5), st.integers(1, 3), st.integers(-40, 40))
def test_mxfp4_takes_the_nearest_number_and_packs_its_own_numbers_unchanged(experts, rows, blocks, power):
    torch.manual_seed(power)
    weight = torch.randn(experts, rows, blocks * MX_BLOCK) * 2.0**power
    weight[:, :, ::5] = 0
    codes, scales = pack_mxfp4(weight)
    assert codes.shape == (experts, rows, blocks * MX_BLOCK // 2)
    assert codes.nbytes + scales.nbytes == weight.numel() * 17 / 32
    found = unpacked(codes, scales)
    grid = torch.tensor([*E2M1, *(-one for one in E2M1)])
    units = torch.ldexp(weight.unflatten(-1, (-1, MX_BLOCK)), 127 - scales.int().unsqueeze(-1)).unsqueeze(-1)
    nearest = (units - grid).abs().amin(-1)
    mine = torch.ldexp(found.unflatten(-1, (-1, MX_BLOCK)), 127 - scales.int().unsqueeze(-1))
    assert torch.equal((mine - units.squeeze(-1)).abs(), nearest)
    assert units.abs().max() < 8, "the largest number of a block is in the range of the codes, or becomes 6"
    again = unpacked(*pack_mxfp4(found))
    assert torch.equal(again, found)


def test_mxfp4_of_zeros_and_of_the_smallest_and_largest_exponents():
    weight = torch.zeros(1, 3, MX_BLOCK)
    weight[0, 1, 0], weight[0, 2, 0] = 2.0**-126, 2.0**127
    codes, scales = pack_mxfp4(weight)
    assert torch.equal(unpacked(codes, scales), weight)
    assert int(scales.max()) < 255, "which means NaN"
