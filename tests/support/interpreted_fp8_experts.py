"""Compares the Triton kernels of fp8 experts with their plain
references, in float16 (see interpreted_lora.py)."""

from __future__ import annotations

import itertools

import torch

from fxtune.kernels import (
    expert_adapters_triton,
    expert_layer,
    fp8,
    fp8_experts,
    fp8_experts_triton,
    fp8_triton,
    gated_experts,
    gated_experts_triton,
)
from fxtune.kernels.fp8 import E4M3, SMALLEST
from fxtune.kernels.grouped_matmul import OwnRouting, Routing
from fxtune.kernels.swiglu import SILU, Activation
from fxtune.kernels.token_exchange import sorted_rows

gated_experts_triton.COLUMNS = 32
gated_experts_triton.FORWARD.update(ROWS=16, COLUMNS=32)
gated_experts_triton.BACKWARD.update(ROWS=16, COLUMNS=32)
expert_adapters_triton.PROJECT.update(ROWS=16, COLUMNS=32)
expert_adapters_triton.OUTER.update(ROWS=16, COLUMNS=32)
expert_adapters_triton.EXPAND.update(ROWS=16, COLUMNS=32)
fp8_experts_triton.PRODUCT.update(ROWS=16, COLUMNS=32, DEPTH=32)
fp8_triton.SIDE = 32
INTERLEAVED = Activation("gelu_pytorch_tanh", interleaved=True)
KIND, CLOSE = torch.float16, dict(rtol=1e-2, atol=2e-2)


def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (scale * torch.randn(shape)).to(KIND)


def close(mine: fp8_experts.Rows, wanted: fp8_experts.Rows) -> None:
    """Triton's interpreter loses the carry where rounding reaches the next power of two, so some codes differ."""
    torch.testing.assert_close(mine[1], wanted[1], rtol=5e-3, atol=0)
    one, other = (codes.view(torch.uint8) for codes, _ in (mine, wanted))
    assert (one == other).float().mean() > 0.9


def tokens_and_rows(routing: Routing, tokens: int, k: int, width: int, ranks: int) -> None:
    experts, token, count = len(routing.ends), routing.order // k, len(routing.order)
    states, narrow = draw(tokens, width), draw(count, ranks)
    for factor in (draw(experts, width, ranks, scale=0.2), draw(experts, ranks, width, scale=0.2).mT):
        torch.testing.assert_close(
            expert_adapters_triton.project(states, token, factor, routing.ends),
            gated_experts.project(states, token, factor, routing.ends),
            **CLOSE,
        )
        torch.testing.assert_close(
            expert_adapters_triton.expand(narrow, factor.mT, routing.ends),
            fp8_experts.expand(narrow, factor.mT, routing.ends),
            **CLOSE,
        )
    for given, of in ((states, token), (draw(count, width + 8)[:, :width], None)):
        torch.testing.assert_close(
            expert_adapters_triton.outer(given, of, narrow, routing.ends),
            gated_experts.outer_of(given, of, narrow, routing.ends),
            **CLOSE,
        )
    close(
        fp8_experts_triton.quantize_tokens(states, count, routing.back, SMALLEST),
        fp8_experts.quantize_tokens(states, token, routing.back),
    )
    factors = torch.rand(experts, width) + 0.1
    close(
        fp8_experts_triton.quantize_scaled(states, token, factors, routing.ends, SMALLEST),
        fp8_experts.quantize_scaled(states, token, factors, routing.ends),
    )
    rows, more, weights = draw(count, width), draw(count, width), torch.rand(tokens, k)
    torch.testing.assert_close(
        gated_experts_triton.add_up(rows, routing.back, weights, k, plus=more),
        gated_experts.combine(rows, routing.back, weights, k, plus=more),
        **CLOSE,
    )


def products(routing: Routing, width: int, columns: int, ranks: int) -> None:
    experts, rows = len(routing.ends), len(routing.back)
    weights = fp8_experts.quantize_experts(draw(experts, columns, width))
    turned = torch.empty(experts, width, columns, dtype=torch.uint8)
    fp8_triton.transpose(weights.codes, turned)
    assert torch.equal(turned, weights.codes.mT)
    x, low = fp8.quantize_rows(draw(rows, width)), (draw(rows, ranks), draw(experts, columns, ranks, scale=0.2).mT)
    for given in (None, low):
        mine = fp8_experts_triton.product(x[0], x[1], weights.codes.view(E4M3), weights.scales, routing.ends, given)
        wanted = fp8_experts.scaled_product(x, weights.codes, weights.scales, routing.ends, torch.bfloat16, low=given)
        torch.testing.assert_close(mine, wanted, rtol=1e-2, atol=2e-2)


def layer_of(ends, b1, a2, act: Activation, bias=None) -> expert_layer.Layer:
    """The arguments that the activation reads."""
    given = dict(zip(("act", "alpha", "limit", "shift", "interleaved"), act, strict=True))
    given |= dict(ends=ends, b1=b1, a2=a2, bias1=bias)
    return expert_layer.Layer(**dict.fromkeys(expert_layer.Layer._fields) | given)


def activation(routing: Routing, width: int, ranks: tuple[int, int], act: Activation) -> None:
    """Compare the activation forward and backward, with what they quantize."""
    rows, experts, ends = len(routing.back), len(routing.ends), routing.ends
    g, r1, b1 = draw(rows, 2 * width), draw(rows, ranks[0]), draw(experts, 2 * width, ranks[0], scale=0.2)
    a2, dh, dr2 = draw(experts, ranks[1], width, scale=0.2), draw(rows, width), draw(rows, ranks[1])
    w, factors = torch.rand(rows, 1), torch.rand(experts, 2 * width) + 0.1
    h, r2 = gated_experts._pair(g, width, ranks[1], False)
    layer = layer_of(ends, b1, a2, act)
    codes = gated_experts_triton.forward(layer, g, r1, h, r2, SMALLEST)
    wanted, wanted_r2 = fp8_experts.activate(layer, g, r1)
    torch.testing.assert_close(r2, wanted_r2, **CLOSE)
    close(codes, fp8.quantize_rows(h))
    close(codes, wanted)
    for given in (None, factors):
        dg, dr1 = torch.empty_like(g), torch.empty_like(r1)
        dw, wh, codes = gated_experts_triton.backward(layer, g, r1, dh, dr2, w, dg, dr1, SMALLEST, given)
        exact, wanted, *others = fp8_experts.activate_backward(layer, g, r1, dh, dr2, w, given)
        for mine, other in zip((dg, dr1, dw, wh), (exact, *others), strict=True):
            torch.testing.assert_close(mine, other, rtol=2e-2, atol=5e-2)
        close(codes, fp8_experts._quantized(dg, ends, given))


torch.manual_seed(0)
compared = 0
SHAPES = (((40, 4, 6), (48, (8, 16))), ((7, 1, 1), (80, (0, 0))))
for ((tokens, k, experts), (width, ranks)), act in itertools.product(SHAPES, (SILU, INTERLEAVED)):
    index = torch.rand(tokens, experts).topk(k, -1).indices
    routing = Routing(index, experts)
    activation(routing, width, ranks, act)
    if ranks[0]:
        tokens_and_rows(routing, tokens, k, width, ranks[0])
        some = OwnRouting(*sorted_rows(index, experts // 2, experts // 3))
        tokens_and_rows(some, tokens, k, width, ranks[0])
        products(routing, width, 48, ranks[1])
    compared += 1
print(compared, "compared")
