"""Packed weights on a GPU: MXFP4 is unpacked to the numbers of the reference, and experts compute what the dequantized
ones do."""

from __future__ import annotations

import pytest
import torch

from fxtune.kernels.gated_experts import Adapter, gated_experts
from fxtune.kernels.grouped_matmul import Routing
from fxtune.kernels.quantized import MX_BLOCK, unpack_mxfp4
from fxtune.kernels.swiglu import Activation
from fxtune.techniques.experts.quantized import dequantize, packed_matrices

GPU = torch.device("cuda", 0)
GPT_OSS = Activation(alpha=1.702, limit=7.0, shift=1.0, interleaved=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "width"), [(1, 32), (1003, 96), (4096, 2880)])
def test_mxfp4_is_unpacked_as_by_the_reference(rows, width, dtype):
    codes = torch.randint(256, (rows, width // 2), dtype=torch.uint8)
    scales = torch.randint(1, 254, (rows, width // MX_BLOCK), dtype=torch.uint8)
    wanted, found = torch.empty(rows, width, dtype=dtype), torch.empty(rows, width, dtype=dtype, device=GPU)
    unpack_mxfp4(codes, scales, wanted)
    unpack_mxfp4(codes.to(GPU), scales.to(GPU), found)
    assert torch.equal(found.cpu(), wanted)


@pytest.mark.parametrize("rank", [16, 0])
@pytest.mark.parametrize("kind", ["mxfp4", "nf4", "int8"])
def test_packed_experts_compute_what_the_dequantized_ones_do(kind, rank):
    """The same products of the same numbers, so the same bits."""
    if kind != "mxfp4":
        pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    tokens, k, experts, size, width = 512, 4, 8, 256, 192
    draw = lambda *sizes: (torch.randn(sizes, device=GPU) / 16).bfloat16()  # noqa: E731
    whole = draw(experts, 2 * width, size), draw(experts, size, width)
    packs = [packed_matrices(one, kind, torch.bfloat16, GPU) for one in whole]
    plain = [dequantize(kind, one, of.shape, torch.bfloat16) for one, of in zip(packs, whole, strict=True)]
    halves = draw(experts, rank, size), draw(experts, 2 * width, rank), draw(experts, rank, width)
    trained = [16 * draw(tokens, size), torch.rand(tokens, k, device=GPU), *halves, draw(experts, size, rank)]
    trained = [one.requires_grad_() for one in trained]
    routing = Routing(torch.randn(tokens, experts, device=GPU).topk(k, -1).indices, experts)
    rows, seed = (routing.order, routing.back, routing.ends), draw(tokens, size)
    biases = draw(experts, 2 * width), draw(experts, size)

    def computed(matrices, stored):
        hidden, weights, a1, b1, a2, b2 = trained
        adapters = Adapter(a1, b1), Adapter(a2, b2)
        out = gated_experts(hidden, weights, *rows, matrices, adapters, GPT_OSS, biases=biases, stored=stored)
        return [out, *torch.autograd.grad(out, trained, seed)]

    found = computed(tuple(packs), kind)
    for mine, other in zip(found, computed(tuple(plain), ""), strict=True):
        assert torch.equal(mine, other)
