"""Full fine-tuning in fp8 on a GPU: the kernel is as in plain torch, products and models are close to float32 and
bfloat16, and faster."""

from __future__ import annotations

import pytest
import torch
from support import reference
from torch.nn import functional as F

from fxtune.kernels import fp8_training
from fxtune.techniques.float8 import Float8, Float8Linear, WeightGradient
from fxtune.techniques.pipeline import Pipeline


@pytest.fixture(autouse=True)
def _capable():
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 needs compute capability 8.9")


@pytest.mark.parametrize(("rows", "width"), [(24, 64), (37, 96), (256, 512), (1000, 4096)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_matrix_and_its_transpose_are_quantized_as_in_plain_torch(rows, width, dtype):
    size = torch.logspace(-6, 4, rows, device="cuda")[:, None]
    x = (torch.randn(rows, width + 16, device="cuda") * size).to(dtype)[:, :width]
    factors = fp8_training.row_scales(x).reciprocal()
    others = factors * 0.37
    found = torch.ops.fxtune.fp8_both(x, factors, others)
    expected = torch.ops.fxtune.fp8_both(x.cpu(), factors.cpu(), others.cpu())
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert torch.equal(one.cpu().view(torch.uint8), other.view(torch.uint8))
    assert torch.equal(torch.ops.fxtune.fp8_transpose(x, others).view(torch.uint8), found[1].view(torch.uint8))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize(("rows", "inner", "out"), [(1000, 2048, 4096), (24, 64, 96)])
def test_products_are_near_those_of_float32(rows, inner, out, in_fp8, compiled):
    x, weight, dy = (
        torch.randn(size, device="cuda") * scale
        for size, scale in (((rows, inner), 1.0), ((out, inner), 0.02), ((rows, out), 1e-6))
    )
    function = torch.compile(fp8_training.linear, fullgraph=True) if compiled else fp8_training.linear
    for dtype in (torch.bfloat16, torch.float32):
        a, b = x.bfloat16().requires_grad_(), weight.to(dtype).requires_grad_()
        y = function(a, b, in_fp8)
        found = [y, *torch.autograd.grad(y, (a, b), dy.bfloat16())]
        assert [one.dtype for one in found] == [torch.bfloat16, torch.bfloat16, dtype]
        wide, plain = x.clone().requires_grad_(), weight.clone().requires_grad_()
        exact = F.linear(wide, plain)
        for one, other in zip(found, [exact, *torch.autograd.grad(exact, (wide, plain), dy)], strict=True):
            assert reference.relative(one, other) < 0.05


@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_trained_in_fp8_is_close_to_one_in_bfloat16(compiled):
    given, results = reference.batch("llama"), []
    for enabled in (True, False):
        pipeline = Pipeline()
        pipeline.attention.backend, pipeline.compile.enabled = "sdpa", compiled
        pipeline.float8 = Float8(enabled)
        model, made, evidence, _ = reference.build(pipeline, "llama", given)
        assert [one.acted for one in evidence if one.technique == "float8"] == [True] * 3 * enabled
        assert sum(isinstance(one, Float8Linear) for one in model.modules()) == 14 * enabled
        model.train()
        loss = reference.loss_of(made, model, given)
        loss.backward()
        gradients = {name: one.grad.float().cpu() for name, one in model.named_parameters() if one.grad is not None}
        results.append(reference.Result(loss.item(), reference.logits(made, model, given).cpu(), gradients))
    apart = reference.relative_errors(*results)
    assert 0 < apart["grads"] < 0.15, apart
    assert abs(results[0].loss / results[1].loss - 1) < 0.005


@pytest.mark.timed
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="for Hopper and newer"
)
@pytest.mark.parametrize(("gradient", "share"), [(WeightGradient.float8, 0.8), (WeightGradient.bfloat16, 0.95)])
def test_fp8_is_faster_than_bfloat16(gradient, share):
    """A norm and a linear of an 8B model's MLP over 16k tokens, forward and backward, everything quantized in each."""
    x, dy = (torch.randn(16384, width, device="cuda").bfloat16() for width in (4096, 14336))
    linear = torch.nn.Linear(4096, 14336, bias=False, device="cuda", dtype=torch.bfloat16)
    norm = torch.nn.RMSNorm(4096, device="cuda", dtype=torch.bfloat16)
    times = {}
    for name, module in (("bfloat16", linear), ("fp8", Float8Linear.of(linear, gradient))):
        layer = torch.compile(torch.nn.Sequential(norm, module), fullgraph=True)
        given = x.clone().requires_grad_()
        times[name] = milliseconds(
            lambda layer=layer, given=given: torch.autograd.grad(layer(given), (given, linear.weight), dy)
        )
    print(times)
    assert times["fp8"] < share * times["bfloat16"], times


def milliseconds(run) -> float:
    for _ in range(3):
        run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(10):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 10
