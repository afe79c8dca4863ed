"""The three products of a trained linear in fp8, against float32, and how they are traced and recomputed."""

from __future__ import annotations

import pytest
import torch
from support.cases import slow_but
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from fxtune.kernels import fp8_training
from fxtune.techniques.checkpointing.policy import Rule

both = pytest.mark.parametrize("in_fp8", [True, False])


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return ((one.float() - other.float()).norm() / other.float().norm()).item()


def drawn(rows: int = 51, inner: int = 96, out: int = 64, dtype: torch.dtype = torch.bfloat16):
    """x, weight and dy; the gradient is small, as in training, and the first token has large numbers."""
    draw = torch.Generator().manual_seed(0)
    x, weight, dy = (
        torch.randn(size, generator=draw) * scale
        for size, scale in (((3, rows // 3, inner), 1.0), ((out, inner), 0.02), ((3, rows // 3, out), 1e-6))
    )
    x[0, 0] *= 1000
    return (
        x.bfloat16().requires_grad_(),
        weight.to(dtype).requires_grad_(),
        dy.bfloat16(),
    )


def products(function, x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    y = function(x, weight)
    return [y.detach(), *torch.autograd.grad(y, (x, weight), dy.to(y.dtype))]


def exact(x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    wide = [tensor.detach().float().requires_grad_() for tensor in (x, weight)]
    return products(F.linear, *wide, dy.float())


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [51, 96])
def test_three_products_are_near_those_of_float32(in_fp8, dtype, rows):
    given = drawn(rows, dtype=dtype)
    found = products(lambda x, weight: fp8_training.linear(x, weight, in_fp8), *given)
    assert [tensor.dtype for tensor in found] == [torch.bfloat16, torch.bfloat16, dtype]
    for result, expected in zip(found, exact(*given), strict=True):
        assert apart(result[1:], expected[1:]) < 0.05
    assert apart(found[2], exact(*given)[2]) < (0.05 if in_fp8 else 0.004)


def test_a_token_with_large_numbers_does_not_change_the_others():
    x, weight, _ = drawn()
    quiet = x.detach().clone()
    quiet[0, 0] /= 1000
    loud, calm = (fp8_training.linear(tensor, weight) for tensor in (x, quiet))
    assert torch.equal(loud.flatten(0, 1)[1:], calm.flatten(0, 1)[1:])


def test_zeros_give_zeros_and_nonfinite_numbers_spread_as_in_bfloat16():
    x, weight, dy = drawn()
    assert all(not tensor.any() for tensor in products(fp8_training.linear, x, weight, torch.zeros_like(dy))[1:])
    with torch.no_grad():
        x[0, 3], x[1, 5, 7], x[2, 2, 0] = 0, float("nan"), float("inf")
    y, dx, dweight = products(fp8_training.linear, x, weight, dy)
    assert not y[0, 3].any()
    assert [tuple(tensor) for tensor in y.isfinite().all(-1).logical_not().nonzero().tolist()] == [(1, 5), (2, 2)]
    assert dx.isfinite().all()
    assert not dweight.isfinite().any(), "so the step is skipped"


@both
def test_autocast_gives_its_dtype_and_float32_weights_their_own_gradients(in_fp8):
    x, weight, dy = drawn(dtype=torch.float32)
    plain = products(lambda x, weight: fp8_training.linear(x, weight, in_fp8), x, weight, dy)
    wide = x.detach().float().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = fp8_training.linear(wide, weight, in_fp8)
    assert torch.equal(y, plain[0])
    dx, dweight = torch.autograd.grad(y, (wide, weight), dy)
    assert (dx.dtype, dweight.dtype) == (torch.float32, torch.float32)
    assert torch.equal(dweight, plain[2])


@pytest.mark.parametrize("in_fp8", slow_but([True, False], True))
def test_one_graph_also_with_recomputation(in_fp8):
    x, weight, dy = drawn(96)

    def layer(x, weight):
        return F.silu(fp8_training.linear(F.silu(x), weight, in_fp8))

    expected = products(layer, x, weight, dy)
    saves = [(rule.contexts(), number) for rule, number in ((Rule(), 3), (Rule(saved=()), 4))]
    for context, number in saves:

        def recomputed(x, weight, context=context):
            return checkpoint(layer, x, weight, use_reentrant=False, context_fn=context)

        for function in (recomputed, torch.compile(recomputed, backend="aot_eager", fullgraph=True)):
            for result, other in zip(products(function, x, weight, dy), expected, strict=True):
                # Traced functions round less often, so some numbers have the next code.
                assert apart(result, other) <= (0 if function is recomputed else 0.03)
        with FlopCounterMode(display=False) as counter:
            products(recomputed, x, weight, dy)
        assert counter.get_total_flops() == number * 2 * weight.numel() * 96
    torch.compiler.reset()
