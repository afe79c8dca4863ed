"""The experts of a mixture as one operator: as torch computes them token by token, with gradients."""

from __future__ import annotations

import pytest
import torch

from fxtune.kernels.gated_experts import Adapter, gated_experts, with_space
from fxtune.kernels.grouped_matmul import Routing
from fxtune.kernels.matmul import CUBLAS, CUTE
from fxtune.kernels.swiglu import Activation
from fxtune.techniques.experts.quantized import dequantize, packed_matrices

TOKENS, K, EXPERTS, SIZE, WIDTH, RANKS = 7, 2, 4, 6, 5, (3, 2)
INDEX = torch.tensor([[0, 2], [2, 0], [3, 2], [0, 3], [2, 3], [0, 2], [3, 0]])
"""No token uses expert 1."""
GPT_OSS = Activation(alpha=1.702, limit=1.5, shift=1.0, interleaved=True)
ACTIVATIONS = [Activation(), Activation("gelu_pytorch_tanh"), Activation(limit=0.5), GPT_OSS]


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def case(biased=False):
    hidden, weights = draw(TOKENS, SIZE), draw(TOKENS, K, seed=1).abs()
    matrices = draw(EXPERTS, 2 * WIDTH, SIZE, seed=2), draw(EXPERTS, SIZE, WIDTH, seed=3)
    first = draw(EXPERTS, RANKS[0], SIZE, seed=4), draw(EXPERTS, 2 * WIDTH, RANKS[0], seed=5)
    last = draw(EXPERTS, RANKS[1], WIDTH, seed=6), draw(EXPERTS, SIZE, RANKS[1], seed=7)
    biases = (draw(EXPERTS, 2 * WIDTH, seed=8), draw(EXPERTS, SIZE, seed=9)) if biased else (None, None)
    trained = [tensor.requires_grad_() for tensor in (hidden, weights, *first, *last)]
    return trained, (matrices, biases)


def operator(frozen, act, hidden, weights, a1, b1, a2, b2, keep=True):
    routing = Routing(INDEX, EXPERTS)
    matrices, biases = frozen
    if act.interleaved:  # then a model keeps them transposed, too
        matrices = tuple(matrix.mT.contiguous().mT for matrix in matrices)
    adapters = Adapter(a1, b1), Adapter(a2, b2)
    rows = routing.order, routing.back, routing.ends
    options = dict(keep=keep, trained=matrices[0].requires_grad)
    return gated_experts(hidden, weights, *rows, matrices, adapters, act, biases=biases, **options)


def plain(frozen, act, hidden, weights, a1, b1, a2, b2):
    """Token by token, as transformers writes it, with the adapters added to the weights."""
    (gate_up, down), (bias1, bias2) = frozen
    gate_up, down = gate_up + b1 @ a1, down + b2 @ a2
    out = []
    for token, experts in enumerate(INDEX.tolist()):
        total = 0
        for rank, expert in enumerate(experts):
            inner = gate_up[expert] @ hidden[token] + (0 if bias1 is None else bias1[expert])
            gate, up = (inner[::2], inner[1::2]) if act.interleaved else inner.chunk(2)
            if act.limit:
                gate, up = gate.clamp(max=act.limit), up.clamp(-act.limit, act.limit)
            if act.name == "silu":
                value = gate * torch.sigmoid(gate * act.alpha)
            else:
                value = torch.nn.functional.gelu(gate, approximate="tanh")
            y = down[expert] @ (value * (up + act.shift)) + (0 if bias2 is None else bias2[expert])
            total = total + weights[token, rank] * y
        out.append(total)
    return torch.stack(out)


@pytest.mark.parametrize("matrices", ["frozen", "trained"])
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_values_and_gradients(act, matrices):
    trained, frozen = case(biased=act.limit > 0)
    if matrices == "trained":
        trained += [matrix.requires_grad_() for matrix in frozen[0]]
    wanted, seed = plain(frozen, act, *trained[:6]), draw(TOKENS, SIZE, seed=8)
    gradients = torch.autograd.grad(wanted, trained, seed)
    for keep in (True, False):
        found = operator(frozen, act, *trained[:6], keep=keep)
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(torch.autograd.grad(found, trained, seed), gradients)


@pytest.mark.parametrize("act", [ACTIVATIONS[0], GPT_OSS])
def test_weights_with_space_for_adapters_give_the_same(act):
    """The space is written and read, in both orders of strides."""
    trained, (matrices, biases) = case(biased=act.limit > 0)
    if act.interleaved:
        matrices = tuple(matrix.mT.contiguous().mT for matrix in matrices)
    spaced = tuple(with_space(matrix, rank, dim) for matrix, rank, dim in zip(matrices, RANKS, (1, 2), strict=True))
    routing, seed, results = Routing(INDEX, EXPERTS), draw(TOKENS, SIZE, seed=8), []
    hidden, weights, a1, b1, a2, b2 = trained
    for given in (matrices, spaced):
        given_adapters = Adapter(a1, b1), Adapter(a2, b2)
        rows = routing.order, routing.back, routing.ends
        out = gated_experts(hidden, weights, *rows, given, given_adapters, act, CUTE, biases)
        results.append([out.detach(), *torch.autograd.grad(out, trained, seed)])
    for mine, other in zip(*results, strict=True):
        torch.testing.assert_close(mine, other)
    rows_of_a1 = spaced[0].as_strided((EXPERTS, 2 * WIDTH + RANKS[0], SIZE), spaced[0].stride())[:, 2 * WIDTH :]
    columns_of_b2 = spaced[1].as_strided((EXPERTS, SIZE, WIDTH + RANKS[1]), spaced[1].stride())[..., WIDTH:]
    assert torch.equal(rows_of_a1, a1), "the space is used"
    assert torch.equal(columns_of_b2, b2)


@pytest.mark.parametrize("learns", [False, True], ids=["frozen", "trained"])
def test_the_operators_are_described_to_the_compiler(learns):
    trained, (matrices, biases) = case(biased=True)
    described([[matrix.requires_grad_(learns)] for matrix in matrices], trained, biases, GPT_OSS, "", learns)


def described(matrices, trained, biases, act, stored, learns=False):
    routing = Routing(INDEX, EXPERTS)
    rows, (hidden, weights, *adapters) = (routing.order, routing.back, routing.ends), trained
    options = *act, "cublas", stored, True, learns
    given = hidden, weights, *rows, *matrices, *adapters, *biases, *options
    torch.library.opcheck(torch.ops.fxtune.gated_experts.default, given)


def packed_case(kind, ranks=RANKS, size=64, width=128):
    """Trained tensors in float32; the packed matrices, the same dequantized, and biases."""
    made = [draw(TOKENS, size), draw(TOKENS, K, seed=1).abs()]
    for rank, out, inner, seed in ((ranks[0], 2 * width, size, 4), (ranks[1], size, width, 6)):
        made += [draw(EXPERTS, rank, inner, seed=seed) / 8, draw(EXPERTS, out, rank, seed=seed + 1) / 8]
    trained = [tensor.float().requires_grad_() for tensor in made]
    whole = [draw(EXPERTS, 2 * width, size, seed=2).float() / 8, draw(EXPERTS, size, width, seed=3).float() / 8]
    packs = [packed_matrices(tensor, kind, torch.float32, tensor.device) for tensor in whole]
    plain = tuple(dequantize(kind, pack, of.shape, torch.float32) for pack, of in zip(packs, whole, strict=True))
    biases = draw(EXPERTS, 2 * width, seed=8).float(), draw(EXPERTS, size, seed=9).float()
    return trained, tuple(packs), plain, biases


def computed(trained, matrices, biases, stored, gemm=CUBLAS):
    routing, (hidden, weights, a1, b1, a2, b2) = Routing(INDEX, EXPERTS), trained
    rows, adapters = (routing.order, routing.back, routing.ends), (Adapter(a1, b1), Adapter(a2, b2))
    out = gated_experts(hidden, weights, *rows, matrices, adapters, GPT_OSS, gemm, biases, stored)
    return [out, *torch.autograd.grad(out, trained, draw(*out.shape, seed=8).float())]


PACKED = ["mxfp4", "nf4", "int8"]


@pytest.mark.parametrize("ranks", [RANKS, (0, 0)], ids=["adapters", "none"])
@pytest.mark.parametrize("kind", PACKED)
def test_packed_experts_are_the_dequantized_ones(kind, ranks):
    trained, matrices, dequantized, biases = packed_case(kind, ranks)
    wanted = computed(trained, dequantized, biases, "")
    for gemm in (CUBLAS, CUTE):
        for mine, other in zip(computed(trained, matrices, biases, kind, gemm), wanted, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


def test_nothing_but_inputs_is_kept_on_request():
    trained, frozen = case()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
        operator(frozen, Activation(), *trained, keep=False)
    assert not any(tensor.shape[0] == TOKENS * K and tensor.dim() == 2 for tensor in kept)


def test_packed_experts_are_described_to_the_compiler_and_keep_only_codes():
    trained, matrices, _, biases = packed_case("mxfp4")
    described([list(matrix) for matrix in matrices], trained, biases, GPT_OSS, "mxfp4")
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
        computed(trained, matrices, biases, "mxfp4")
    of_weights = [tensor for tensor in kept if tensor.dtype is torch.uint8]
    assert {weight.data_ptr() for weight in of_weights} == {
        tensor.data_ptr() for matrix in matrices for tensor in matrix
    }
    largest = max(tensor.numel() for tensor in kept if tensor.is_floating_point())
    assert largest < 2 * matrices[0][0].numel() / EXPERTS, "no tensor of all experts"
