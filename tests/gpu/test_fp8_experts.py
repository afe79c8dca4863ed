"""Experts in fp8 on a GPU: as accurate as their rounding by each GEMM, the same bits each time, and they train."""

from __future__ import annotations

import pytest
import torch
from support.architectures import on_disk
from support.mixtures import mixture

from fxtune.distributed.world import World
from fxtune.facts.options import DType, Switch, WeightFormat
from fxtune.kernels import fp8_experts as operators
from fxtune.kernels import matmul
from fxtune.kernels.fp8 import Weight
from fxtune.kernels.fp8_experts import dequantize_experts, fp8_experts, quantize_experts
from fxtune.kernels.gated_experts import Adapter, gated_experts
from fxtune.kernels.grouped_matmul import Routing
from fxtune.models.experts import experts_of
from fxtune.models.load import ModelConfig, load_config
from fxtune.techniques.assemble import assemble
from fxtune.techniques.pipeline import Pipeline, make_probe
from fxtune.techniques.quantize.technique import Quantize

GPU = torch.device("cuda", 0)
SHAPES = {"qwen3": (4096, 8, 128, 2048, 768, 16), "uneven": (1003, 3, 5, 512, 320, 24), "few": (5, 1, 8, 256, 128, 8)}
"""Tokens, experts a token, experts, width of the model and of an expert, rank."""
LIMIT = 0.08
"""Largest relative error: two products with an activation between them, and each operand's rounding is 0.026."""


@pytest.fixture(autouse=True)
def _capable():
    if torch.cuda.get_device_capability() != matmul.CAPABILITY:
        pytest.skip("grouped products in fp8 are for compute capability 9.0")


def case(shape: str):
    tokens, k, experts, size, width, rank = SHAPES[shape]
    draw = lambda *sizes, scale: (scale * torch.randn(sizes, device=GPU)).bfloat16()  # noqa: E731
    scores = torch.randn(tokens, experts, device=GPU)
    scores[:, 1] -= 10  # hardly any token uses this one
    routing = Routing(scores.topk(k, -1).indices, experts)
    trained = [
        draw(tokens, size, scale=1.0),
        torch.rand(tokens, k, device=GPU),
        draw(experts, rank, size, scale=size**-0.5),
        draw(experts, 2 * width, rank, scale=0.3),
        draw(experts, rank, width, scale=width**-0.5),
        draw(experts, size, rank, scale=0.3),
    ]
    matrices = draw(experts, 2 * width, size, scale=size**-0.5), draw(experts, size, width, scale=width**-0.5)
    return routing, trained, matrices


def run(function, routing, trained, matrices, seed, **options):
    hidden, weights, a1, b1, a2, b2 = trained = [one.detach().requires_grad_() for one in trained]
    adapters = Adapter(a1, b1), Adapter(a2, b2)
    out = function(hidden, weights, routing.order, routing.back, routing.ends, matrices, adapters, **options)
    return [out.detach(), *torch.autograd.grad(out, trained, seed)]


@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize("gemm", [operators.TORCH, operators.TRITON])
@pytest.mark.parametrize("shape", SHAPES)
def test_accurate_and_reproducible(shape, gemm, transpose):
    routing, trained, matrices = case(shape)
    seed, made = torch.randn_like(trained[0]), tuple(quantize_experts(one, transpose) for one in matrices)
    found, again = (run(fp8_experts, routing, trained, made, seed, gemm=gemm) for _ in range(2))
    plain = tuple(dequantize_experts(one.codes, one.scales, torch.bfloat16) for one in made)
    wanted = run(gated_experts, routing, trained, plain, seed)
    for name, mine, same, exact in zip(
        ("out", "hidden", "weights", "a1", "b1", "a2", "b2"), found, again, wanted, strict=True
    ):
        assert torch.equal(mine, same), name
        error = ((mine.float() - exact.float()).norm() / exact.float().norm().clamp(min=1e-9)).item()
        assert error < LIMIT, (name, error)


@pytest.mark.parametrize("gemm", [operators.TORCH, operators.TRITON])
def test_products_of_groups_of_any_size_match_the_reference(gemm):
    routing, trained, matrices = case("uneven")
    made, token = quantize_experts(matrices[0]), routing.order // 3
    x = operators.quantize_tokens(trained[0], token, routing.back)
    found = operators.scaled_product(x, made.codes, made.scales, routing.ends, torch.bfloat16, gemm)
    wanted = operators.scaled_product(
        (x[0].cpu(), x[1].cpu()), made.codes.cpu(), made.scales.cpu(), routing.ends.cpu(), torch.float32
    )
    assert (found.cpu() - wanted).norm() < 5e-3 * wanted.norm()


def test_experts_on_a_gpu_are_quantized_as_on_a_cpu():
    weight = case("uneven")[2][0]
    mine, other = quantize_experts(weight), quantize_experts(weight.cpu())
    assert isinstance(mine, Weight)
    assert all(torch.equal(one.cpu(), same) for one, same in zip(mine, other, strict=True))


def over_fp8() -> Pipeline:
    pipeline = Pipeline()
    pipeline.lora.enabled, pipeline.lora.fused = True, Switch.on
    pipeline.quantize = Quantize(True, WeightFormat.fp8, compute_dtype=DType.bfloat16, experts=Switch.on)
    return pipeline


def test_experts_that_are_quantized_as_they_are_read_have_the_bits_of_a_model_that_is_read_whole(
    tmp_path, monkeypatch
):
    """From files that store each expert apart."""
    drawn = mixture("qwen3_moe", hidden_size=256, moe_intermediate_size=128, num_experts=8)
    model = ModelConfig(path=str(on_disk(tmp_path, dtype=torch.bfloat16, model=drawn)), dtype=DType.bfloat16)
    whole = assemble(over_fp8(), model, load_config(model), World(GPU), 0).module
    monkeypatch.setattr("fxtune.techniques.assemble._quantizes_rows", lambda *_: True)
    monkeypatch.setattr("fxtune.models.weights.read", None)
    pipeline = over_fp8()
    prepared = assemble(pipeline, model, load_config(model), World(GPU), 0)
    for read, expected in zip(experts_of(prepared.module), experts_of(whole), strict=True):
        for stored, same in zip(read.stored_weights(), expected.stored_weights(), strict=True):
            assert all(map(torch.equal, stored, same))
    assert all(seen.acted for seen in pipeline.verify(prepared, make_probe(prepared.module)))


def test_a_mixture_trains_and_its_evidence_is_there():
    model = mixture("qwen3_moe")
    model.dtype = DType.bfloat16
    pipeline = over_fp8()
    prepared = assemble(pipeline, model, load_config(model), World(GPU), 0)
    built = prepared.module
    assert all(one.acted for one in pipeline.verify(prepared, make_probe(built)))
    ids = torch.randint(3, 60, (4, 48), device=GPU)
    optimizer = torch.optim.AdamW([one for one in built.parameters() if one.requires_grad], lr=5e-3)
    losses = []
    for _ in range(10):
        loss = built(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.95 * losses[0]
