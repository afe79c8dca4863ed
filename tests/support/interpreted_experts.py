"""Compares the Triton kernels of gated experts with their plain
references, in float16 (see interpreted_lora.py)."""

from __future__ import annotations

import itertools

import torch

from fxtune.kernels import expert_layer, gated_experts, gated_experts_triton
from fxtune.kernels.grouped_matmul import OwnRouting, Routing
from fxtune.kernels.swiglu import Activation
from fxtune.kernels.token_exchange import sorted_rows

gated_experts_triton.COLUMNS = 32
gated_experts_triton.FORWARD.update(ROWS=16, COLUMNS=32)
gated_experts_triton.BACKWARD.update(ROWS=16, COLUMNS=32)
ACTIVATIONS = (
    Activation(),
    Activation("gelu_pytorch_tanh"),
    Activation(alpha=1.702, limit=1.0, shift=1.0, interleaved=True),
)
KIND, CLOSE = torch.float16, dict(rtol=1e-2, atol=1e-2)


def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (scale * torch.randn(shape)).to(KIND)


def tokens_and_rows(tokens: int, k: int, experts: int, width: int) -> Routing:
    """Compare scatter and add_up, with the rows of all experts and of some, and return the routing of all."""
    index = torch.rand(tokens, experts).topk(k, -1).indices
    whole, some = Routing(index, experts), OwnRouting(*sorted_rows(index, experts // 2, max(experts // 3, 1)))
    for routing in (whole, some):
        states, weights = draw(tokens, width), torch.rand(tokens, k)
        weights[routing.back.view(tokens, k) < 0] = 0
        rows = gated_experts_triton.scatter(states, routing.back, torch.empty(len(routing.order), width, dtype=KIND))
        assert torch.equal(rows, gated_experts.gather(states, routing.order, routing.back))
        expert = torch.searchsorted(routing.ends, routing.back.int(), right=True)
        for given, bias in ((None, None), (weights, None), (weights, draw(experts, width))):
            mine = gated_experts_triton.add_up(rows, routing.back, given, k, bias, expert)
            wanted = gated_experts.combine(rows, routing.back, given, k, bias, routing.ends)
            torch.testing.assert_close(mine, wanted, **CLOSE)
    return whole


def layer_of(ends, b1, a2, act: Activation, bias=None) -> expert_layer.Layer:
    """The arguments that the activation reads."""
    given = dict(zip(("act", "alpha", "limit", "shift", "interleaved"), act, strict=True))
    given |= dict(ends=ends, b1=b1, a2=a2, bias1=bias)
    return expert_layer.Layer(**dict.fromkeys(expert_layer.Layer._fields) | given)


def activation(routing: Routing, width: int, ranks: tuple[int, int], act: Activation) -> None:
    """Compare the activation forward and backward."""
    rows, experts = len(routing.back), len(routing.ends)
    g, r1, b1 = draw(rows, 2 * width), draw(rows, ranks[0]), draw(experts, 2 * width, ranks[0], scale=0.2)
    a2, dh, dr2, w = (
        draw(experts, ranks[1], width, scale=0.2),
        draw(rows, width),
        draw(rows, ranks[1]),
        torch.rand(rows, 1),
    )
    bias = draw(experts, 2 * width) if act.interleaved else None
    layer = layer_of(routing.ends, b1, a2, act, bias)
    for beside in (False, True):
        mine = gated_experts._pair(g, width, ranks[1], beside)
        gated_experts_triton.forward(layer, g, r1, *mine)
        wanted = gated_experts.activate(layer, g, r1, beside)
        torch.testing.assert_close(mine, wanted, **CLOSE)
        dg, dr1 = gated_experts._pair(g, 2 * width, ranks[0], beside)
        dw, wh, _ = gated_experts_triton.backward(layer, g, r1, dh, dr2, w, dg, dr1)
        exact = gated_experts.activate_backward(layer, g, r1, dh, dr2, w, beside)
        torch.testing.assert_close((dg, dr1, dw, wh), exact, rtol=2e-2, atol=5e-2)


def empty_experts_are_cleared() -> None:
    """And only these, the first and the last expert included; a matrix is no multiple of what a program writes."""
    ends = torch.tensor([0, 3, 3, 8, 8], dtype=torch.int32)
    matrices = torch.full((5, 129, 127), float("nan"), dtype=KIND)
    matrices[[1, 3]] = draw(2, 129, 127)
    wanted = torch.where(torch.tensor([False, True, False, True, False])[:, None, None], matrices, 0)
    gated_experts_triton.clear_empty(matrices, ends)
    assert torch.equal(matrices, wanted)


def nan_stays(act: Activation) -> None:
    """A NaN of gate or up is one of h, forward, and of the gradients, backward, although both are limited."""
    width, ends = 32, torch.tensor([2], dtype=torch.int32)
    g, r1, b1, a2 = draw(2, 2 * width), draw(2, 0), draw(1, 2 * width, 0), draw(1, 0, width)
    g[0, 6] = g[1, 9] = float("nan")  # gate 3 and up 4, interleaved
    h, r2 = gated_experts._pair(g, width, 0, False)
    layer = layer_of(ends, b1, a2, act)
    gated_experts_triton.forward(layer, g, r1, h, r2)
    assert h.isnan().nonzero().tolist() == [[0, 3], [1, 4]], h.isnan().nonzero()
    dg, dr1 = torch.empty_like(g), r2
    dw, _, _ = gated_experts_triton.backward(layer, g, r1, draw(2, width), draw(2, 0), torch.ones(2, 1), dg, dr1)
    assert dg.isnan().any(1).all()
    assert dw.isnan().all()


torch.manual_seed(0)
nan_stays(ACTIVATIONS[-1])
empty_experts_are_cleared()
compared = 0
SHAPES = (((40, 4, 6), (40, (8, 16))), ((7, 1, 1), (64, (24, 3))))
for ((tokens, k, experts), (width, ranks)), act in itertools.product(SHAPES, ACTIVATIONS):
    activation(tokens_and_rows(tokens, k, experts, width), width, ranks, act)
    compared += 1
print(compared, "compared")
