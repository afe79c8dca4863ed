"""The experts of a mixture as one operator: as torch computes them token by token, with gradients."""

from __future__ import annotations

import pytest
import torch
from support.runs import SUPPORT, interpreted

from fxtune.kernels.gated_experts import Adapter, gated_experts
from fxtune.kernels.grouped_matmul import Routing

TOKENS, K, EXPERTS, SIZE, WIDTH, RANKS = 7, 2, 4, 6, 5, (3, 2)
INDEX = torch.tensor([[0, 2], [2, 0], [3, 2], [0, 3], [2, 3], [0, 2], [3, 0]])
"""No token uses expert 1."""


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def case():
    hidden, weights = draw(TOKENS, SIZE), draw(TOKENS, K, seed=1).abs()
    matrices = draw(EXPERTS, 2 * WIDTH, SIZE, seed=2), draw(EXPERTS, SIZE, WIDTH, seed=3)
    first = draw(EXPERTS, RANKS[0], SIZE, seed=4), draw(EXPERTS, 2 * WIDTH, RANKS[0], seed=5)
    last = draw(EXPERTS, RANKS[1], WIDTH, seed=6), draw(EXPERTS, SIZE, RANKS[1], seed=7)
    trained = [one.requires_grad_() for one in (hidden, weights, *first, *last)]
    return trained, matrices


def operator(matrices, act, hidden, weights, a1, b1, a2, b2):
    routing = Routing(INDEX, EXPERTS)
    adapters = Adapter(a1, b1), Adapter(a2, b2)
    return gated_experts(hidden, weights, routing.order, routing.back, routing.ends, matrices, adapters, act)


def plain(matrices, act, hidden, weights, a1, b1, a2, b2):
    """Token by token, as transformers writes it, with the adapters added to the weights."""
    gate_up, down = matrices[0] + b1 @ a1, matrices[1] + b2 @ a2
    function = torch.nn.functional.silu if act == "silu" else lambda x: torch.nn.functional.gelu(x, approximate="tanh")
    out = []
    for token, experts in enumerate(INDEX.tolist()):
        total = 0
        for rank, expert in enumerate(experts):
            gate, up = (gate_up[expert] @ hidden[token]).chunk(2)
            total = total + weights[token, rank] * (down[expert] @ (function(gate) * up))
        out.append(total)
    return torch.stack(out)


@pytest.mark.parametrize("act", ["silu", "gelu_pytorch_tanh"])
def test_values_and_gradients(act):
    trained, matrices = case()
    found, wanted = (compute(matrices, act, *trained) for compute in (operator, plain))
    torch.testing.assert_close(found, wanted)
    seed = draw(TOKENS, SIZE, seed=8)
    for mine, other in zip(
        torch.autograd.grad(found, trained, seed), torch.autograd.grad(wanted, trained, seed), strict=True
    ):
        torch.testing.assert_close(mine, other)


def test_the_operators_are_described_to_the_compiler():
    trained, matrices = case()
    routing = Routing(INDEX, EXPERTS)
    hidden, weights, *adapters = trained
    given = hidden, weights, routing.order, routing.back, routing.ends, *matrices, *adapters, "silu", "cublas"
    torch.library.opcheck(torch.ops.fxtune.gated_experts.default, given)


def test_the_triton_kernels_against_the_references():
    pytest.importorskip("triton")
    assert interpreted(SUPPORT / "interpreted_experts.py") == ["12", "compared"]
