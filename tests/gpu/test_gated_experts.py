"""The experts of a mixture on a GPU: as accurate as their rounding by both GEMM backends, the same bits each time, and
one operator in a model that trains."""

from __future__ import annotations

import pytest
import torch
from support import reference
from support.mixtures import mixture

from fxtune.distributed.world import World
from fxtune.facts.options import Switch
from fxtune.kernels import grouped_matmul, matmul
from fxtune.kernels.gated_experts import Adapter, gated_experts, with_space
from fxtune.kernels.grouped_matmul import Routing
from fxtune.kernels.matmul import CUBLAS, CUTE
from fxtune.kernels.swiglu import SILU, Activation
from fxtune.models.load import DType, load_config
from fxtune.system.machine.host import cache_home
from fxtune.techniques.assemble import assemble
from fxtune.techniques.experts.adapted import grouped
from fxtune.techniques.experts.full import observe_computed
from fxtune.techniques.experts.run import no_adapter
from fxtune.techniques.pipeline import Pipeline, make_probe

GPU = torch.device("cuda", 0)
SHAPES = {
    "qwen3": (4096, 8, 128, 2048, 768, (16, 16)),
    "uneven": (1003, 3, 5, 512, 320, (24, 8)),
    "few": (5, 1, 8, 256, 128, (8, 8)),
    "gpt_oss": (1030, 4, 32, 720, 720, (16, 16)),
}
"""Tokens, experts a token, experts, width of the model and of an expert, ranks."""


def prepared(gemm: str) -> str:
    if gemm == CUTE:
        if torch.cuda.get_device_capability() != matmul.CAPABILITY:
            pytest.skip("quack's kernel is taken on compute capability 9.0")
        pytest.importorskip("quack")
        grouped_matmul.prepare(GPU, torch.bfloat16, cache_home() / "quack")
    return gemm


def case(shape: str):
    tokens, k, experts, size, width, (r1, r2) = SHAPES[shape]
    draw = lambda *sizes, scale: (scale * torch.randn(sizes, device=GPU)).bfloat16()  # noqa: E731
    scores = torch.randn(tokens, experts, device=GPU)
    scores[:, 1] -= 10  # hardly any token uses this one
    routing = Routing(scores.topk(k, -1).indices, experts)
    trained = [
        draw(tokens, size, scale=1.0),
        torch.rand(tokens, k, device=GPU),
        draw(experts, r1, size, scale=size**-0.5),
        draw(experts, 2 * width, r1, scale=0.3),
        draw(experts, r2, width, scale=width**-0.5),
        draw(experts, size, r2, scale=0.3),
    ]
    if shape == "gpt_oss":  # it stores [experts, in, out]; the limit acts on few numbers
        matrices = (
            draw(experts, size, 2 * width, scale=1.5 * size**-0.5),
            draw(experts, width, size, scale=width**-0.5),
        )
        biases = draw(experts, 2 * width, scale=1.0), draw(experts, size, scale=1.0)
        act = Activation(alpha=1.702, limit=7.0, shift=1.0, interleaved=True)
        return routing, trained, (*(one.mT for one in matrices), *biases), act
    matrices = draw(experts, 2 * width, size, scale=size**-0.5), draw(experts, size, width, scale=width**-0.5)
    return routing, trained, matrices, SILU


def run(routing, trained, frozen, seed, act=SILU, gemm=CUBLAS):
    hidden, weights, a1, b1, a2, b2 = trained = [one.detach().requires_grad_() for one in trained]
    adapters = Adapter(a1, b1), Adapter(a2, b2)
    matrices, biases = frozen[:2], frozen[2:] or (None, None)
    rows = routing.order, routing.back, routing.ends
    out = gated_experts(hidden, weights, *rows, matrices, adapters, act, gemm, biases)
    return [out.detach(), *torch.autograd.grad(out, trained, seed)]


@pytest.mark.parametrize("gemm", [CUBLAS, CUTE, "space"])
@pytest.mark.parametrize("shape", SHAPES)
def test_accurate_and_reproducible(shape, gemm):
    """`space`: quack's kernel over weights with space for adapters."""
    routing, trained, frozen, act = case(shape)
    seed = torch.randn_like(trained[0])
    if gemm == "space":
        gemm, ranks = CUTE, SHAPES[shape][-1]
        spaced = (with_space(matrix, rank, dim) for matrix, rank, dim in zip(frozen[:2], ranks, (1, 2), strict=True))
        frozen = *spaced, *frozen[2:]
    found, again = (run(routing, trained, frozen, seed, act, prepared(gemm)) for _ in range(2))
    on_cpu = Routing(routing.order.new_zeros(1, 1), 1)
    on_cpu.order, on_cpu.back, on_cpu.ends = routing.order.cpu(), routing.back.cpu(), routing.ends.cpu()
    wide = ([one.cpu().float() for one in each] for each in (trained, frozen))
    wanted = run(on_cpu, *wide, seed.cpu().float(), act)
    for name, mine, same, exact in zip(
        ("out", "hidden", "weights", "a1", "b1", "a2", "b2"), found, again, wanted, strict=True
    ):
        assert torch.equal(mine, same), name
        error = ((mine.cpu().float() - exact).norm() / exact.norm().clamp(min=1e-9)).item()
        assert error < reference.LIMITS["bfloat16"], (name, error)


@pytest.mark.parametrize("shape", ["qwen3", "uneven"])
def test_trained_experts_are_accurate_and_reproducible(shape):
    """Full fine-tuning: gradients of the weights, and no adapters."""
    routing, (hidden, weights, *_), matrices, act = case(shape)
    seed = torch.randn_like(hidden)

    def gradients(routing, seed, *given):
        given = [tensor.detach().requires_grad_() for tensor in given]
        halves, rows = tuple(map(no_adapter, given[2:])), (routing.order, routing.back, routing.ends)
        out = gated_experts(*given[:2], *rows, tuple(given[2:]), halves, act, trained=True)
        return [out.detach(), *torch.autograd.grad(out, given, seed)]

    found, again = (gradients(routing, seed, hidden, weights, *matrices) for _ in range(2))
    on_cpu = Routing(routing.order.new_zeros(1, 1), 1)
    on_cpu.order, on_cpu.back, on_cpu.ends = routing.order.cpu(), routing.back.cpu(), routing.ends.cpu()
    wanted = gradients(on_cpu, *(tensor.cpu().float() for tensor in (seed, hidden, weights, *matrices)))
    for name, mine, same, exact in zip(
        ("out", "hidden", "weights", "gate_up", "down"), found, again, wanted, strict=True
    ):
        assert torch.equal(mine, same), name
        error = ((mine.cpu().float() - exact).norm() / exact.norm()).item()
        assert error < reference.LIMITS["bfloat16"], (name, error)


def test_full_fine_tuning_computes_experts_as_one_operator():
    """With the loss and the gradients of transformers' own code. One layer: rounding cannot move a later router."""
    config = mixture("qwen3_moe", hidden_size=256, moe_intermediate_size=128, num_experts=8, num_hidden_layers=1)
    config.dtype = DType.bfloat16
    results = []
    for by_fxtune in (True, False):
        model = assemble(Pipeline(), config, load_config(config), World(GPU), 0).module
        probe = make_probe(model, packing=False)
        if not by_fxtune:
            model.set_experts_implementation("grouped_mm")
        evidence = observe_computed(model, probe)
        assert (evidence is not None and evidence.acted) == by_fxtune
        loss = model(**probe).logits.float().logsumexp(-1).mean()
        loss.backward()
        results.append((loss.item(), {name: weight.grad.float() for name, weight in model.named_parameters()}))
    (mine, gradients), (plain, wanted) = results
    assert mine == pytest.approx(plain, rel=1e-3)
    for name, exact in wanted.items():
        error = ((gradients[name] - exact).norm() / exact.norm().clamp(min=1e-9)).item()
        assert error < 2 * reference.LIMITS["bfloat16"], (name, error)


def test_space_for_adapters_leaves_no_unused_memory():
    """The weights of experts move to memory with space, and what they leave must be free for other libraries."""
    prepared(CUTE)
    model = mixture("qwen3_moe", hidden_size=1024, moe_intermediate_size=512, num_experts=32)
    model.dtype = DType.bfloat16
    pipeline = Pipeline()
    pipeline.lora.enabled, pipeline.lora.fused, pipeline.lora._by_quack = True, Switch.on, True
    built = assemble(pipeline, model, load_config(model), World(GPU), 0).module
    experts = grouped(built)[0].get_base_layer()
    assert not experts.gate_up_proj.is_contiguous()
    unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    assert unused < experts.gate_up_proj.nbytes
