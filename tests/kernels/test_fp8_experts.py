"""The experts of a mixture over fp8 weights: as over the dequantized weights, up to the rounding of activations."""

from __future__ import annotations

import functools

import pytest
import torch
from support.cases import slow_but

from fxtune.kernels import fp8_experts as operators
from fxtune.kernels.fp8_experts import dequantize_experts, fp8_experts, quantize_experts
from fxtune.kernels.gated_experts import Adapter, gated_experts
from fxtune.kernels.grouped_matmul import Routing
from fxtune.kernels.swiglu import SILU, Activation

TOKENS, K, EXPERTS, SIZE, WIDTH, RANKS = 60, 2, 4, 64, 48, (4, 2)
NAMES = ("out", "hidden", "weights", "a1", "b1", "a2", "b2")


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def routing_of() -> Routing:
    """No token uses expert 1."""
    scores = draw(TOKENS, EXPERTS, seed=9)
    scores[:, 1] = -100
    return Routing(scores.topk(K, -1).indices, EXPERTS)


def case(ranks: tuple[int, int] = RANKS, uneven: bool = False):
    hidden, weights = draw(TOKENS, SIZE), draw(TOKENS, K, seed=1).abs()
    matrices = draw(EXPERTS, 2 * WIDTH, SIZE, seed=2, scale=0.1), draw(EXPERTS, SIZE, WIDTH, seed=3, scale=0.1)
    if uneven:  # rows of very different sizes, whose scales must not be lost in the gradient
        matrices = tuple(weight * torch.logspace(-1, 1, weight.shape[1])[:, None] for weight in matrices)
    first = draw(EXPERTS, ranks[0], SIZE, seed=4, scale=0.1), draw(EXPERTS, 2 * WIDTH, ranks[0], seed=5, scale=0.3)
    last = draw(EXPERTS, ranks[1], WIDTH, seed=6, scale=0.1), draw(EXPERTS, SIZE, ranks[1], seed=7, scale=0.3)
    return [tensor.requires_grad_() for tensor in (hidden, weights, *first, *last)], matrices


def run(function, matrices, trained, act=SILU) -> list[torch.Tensor]:
    hidden, weights, a1, b1, a2, b2 = trained
    routing = routing_of()
    adapters = Adapter(a1, b1), Adapter(a2, b2)
    out = function(hidden, weights, routing.order, routing.back, routing.ends, matrices, adapters, act)
    return [out, *torch.autograd.grad(out, trained, draw(TOKENS, SIZE, seed=8))]


def apart(mine: torch.Tensor, other: torch.Tensor) -> float:
    return ((mine - other).norm() / other.norm()).item()


@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize("act", [SILU, Activation("gelu_pytorch_tanh", interleaved=True)], ids=lambda act: act.name)
def test_values_and_gradients_are_near_those_of_the_dequantized_weights(act, transpose):
    trained, matrices = case(uneven=not transpose)
    made = tuple(quantize_experts(matrix, transpose) for matrix in matrices)
    plain = tuple(dequantize_experts(tensor.codes, tensor.scales, torch.float32) for tensor in made)
    found, wanted = run(fp8_experts, made, trained, act), run(gated_experts, plain, trained, act)
    for name, mine, other in zip(NAMES, found, wanted, strict=True):
        assert apart(mine, other) < 0.06, name


@pytest.mark.parametrize("rank", [128, 129])
def test_a_large_rank_is_left_to_torch(rank, monkeypatch):
    """Triton's tiles of such a rank do not fit in shared memory, so its GEMM must not get them."""
    asked = []
    monkeypatch.setattr(operators, "scaled_product", lambda *given: asked.append(given[5:]))
    monkeypatch.setattr(operators, "expand", lambda *_: None)
    narrow, factor = torch.ones(2, rank), torch.ones(1, rank, 16)
    operators._with_adapter((narrow, narrow), (narrow, narrow), narrow, factor, torch.tensor([2]), operators.TRITON)
    assert [call[0] for call in asked] == [operators.TRITON if rank == 128 else operators.TORCH]


@pytest.mark.parametrize("gemm", [operators.TORCH, operators.TRITON])
def test_what_is_not_rounded_is_exact(gemm, monkeypatch):
    """With activations left as they are, only the order of sums differs from the 16-bit operator's."""
    trained, matrices = case()
    made = tuple(quantize_experts(matrix, False) for matrix in matrices)
    plain = tuple(dequantize_experts(tensor.codes, tensor.scales, torch.float32) for tensor in made)

    def unrounded(x, powers=False, columns=None):
        return (x if columns is None else x * columns), torch.ones(len(x), 1)

    def product(x, codes, scales, ends, dtype, gemm=operators.TORCH, low=None):
        matrices = dequantize_experts(codes, scales, torch.float32)
        made = operators.product(x[0], matrices.mT, ends)
        return made if low is None else made + operators.product(*low, ends)

    monkeypatch.setattr(operators, "quantize_rows", unrounded)
    monkeypatch.setattr(operators, "scaled_product", product)
    monkeypatch.setattr(
        operators,
        "_quantized",
        lambda x, ends, factors: (
            x if factors is None else x * factors[torch.searchsorted(ends, torch.arange(len(x)), right=True)],
            torch.ones(len(x), 1),
        ),
    )
    found, wanted = run(functools.partial(fp8_experts, gemm=gemm), made, trained), run(gated_experts, plain, trained)
    for name, mine, other in zip(NAMES, found, wanted, strict=True):
        assert apart(mine, other) < 1e-5, name


def test_both_layouts_have_the_same_forward_pass_and_equally_accurate_gradients():
    trained, matrices = case()
    kept, one = (tuple(quantize_experts(matrix, transpose) for matrix in matrices) for transpose in (True, False))
    plain = tuple(dequantize_experts(weights.codes, weights.scales, torch.float32) for weights in one)
    first, second = run(fp8_experts, kept, trained), run(fp8_experts, one, trained)
    assert torch.equal(first[0], second[0])
    wanted = run(gated_experts, plain, trained)[1]
    assert apart(first[1], wanted) == pytest.approx(apart(second[1], wanted), rel=0.3)


def test_a_product_that_is_computed_again_gives_the_same():
    trained, matrices = case()
    made = tuple(quantize_experts(matrix) for matrix in matrices)
    kept, again = (run(functools.partial(fp8_experts, keep=keep), made, trained) for keep in (True, False))
    for name, mine, other in zip(NAMES, again, kept, strict=True):
        assert apart(mine, other) < 1e-5, name


def test_experts_without_adapters():
    trained, matrices = case(ranks=(0, 0))
    made = tuple(quantize_experts(matrix) for matrix in matrices)
    plain = tuple(dequantize_experts(tensor.codes, tensor.scales, torch.float32) for tensor in made)
    found, wanted = run(fp8_experts, made, trained), run(gated_experts, plain, trained)
    for name, mine, other in zip(NAMES[:3], found, wanted, strict=False):
        assert apart(mine, other) < 0.06, name
    assert [tensor.shape for tensor in found[3:]] == [tensor.shape for tensor in trained[2:]]


def test_quantized_weights():
    weight = draw(3, 32, 48) * torch.logspace(-2, 2, 32)[:, None]
    made = quantize_experts(weight)
    found = dequantize_experts(made.codes, made.scales, torch.float32)
    assert ((found - weight).norm(dim=2) / weight.norm(dim=2)).max() < 0.04, "each row has a scale of its own"
    half = quantize_experts(weight, transpose=False)
    assert torch.equal(half.codes, made.codes)
    assert torch.equal(half.scales, made.scales)
    assert half.back is half.back_scales is None
    even = quantize_experts(draw(3, 32, 48))
    assert (
        apart(
            dequantize_experts(even.back, even.back_scales, torch.float32),
            dequantize_experts(even.codes, even.scales, torch.float32).mT,
        )
        < 1e-3
    ), "the transpose has the same numbers"


@pytest.mark.parametrize("transpose", slow_but([True, False], True))
def test_the_operators_are_described_to_the_compiler(transpose):
    trained, matrices = case()
    routing, made = routing_of(), [quantize_experts(matrix, transpose) for matrix in matrices]
    first, last = ([tensor for tensor in weights if tensor is not None] for weights in made)
    hidden, weights, *adapters = trained
    given = hidden, weights, routing.order, routing.back, routing.ends, first, last, *adapters
    options = *SILU, "torch", "", True, False
    torch.library.opcheck(torch.ops.fxtune.fp8_experts.default, (*given, None, None, *options))
