"""Full fine-tuning in fp8 on a GPU: the kernel is as in plain torch, products and models are close to float32 and
bfloat16, and faster."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from support import reference
from torch.nn import functional as F

from fxtune.facts.options import WeightGradient
from fxtune.kernels import fp8_training
from fxtune.techniques.float8 import Float8, Float8Linear
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
def test_fp8_is_faster_than_bfloat16_and_torchao():
    """Norm, MLP and residual of an 8B model over 16k tokens, compiled, forward and backward, with all quantization."""
    hidden, inner = 4096, 14336
    x, dy = (torch.randn(1, 16384, hidden, device="cuda").bfloat16() for _ in range(2))
    makers: dict[str, Any] = {"bfloat16": lambda linear: linear}
    for gradient in WeightGradient:
        makers[f"fp8, weight gradient in {gradient.value}"] = partial(Float8Linear.of, weight_gradient=gradient)
    if find_spec("torchao"):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
        from torchao.float8.float8_linear import Float8Linear as TorchaoLinear

        convert_to_float8_training(torch.nn.Sequential())  # works around a bug of Triton
        for recipe in ("tensorwise", "rowwise_with_gw_hp"):
            config = Float8LinearConfig.from_recipe_name(recipe)
            makers[f"torchao {recipe}"] = partial(TorchaoLinear.from_float, config=config)
    times = {}
    for name, maker in makers.items():
        torch.compiler.reset()
        layer = torch.compile(MLP(hidden, inner, maker).to("cuda", torch.bfloat16), fullgraph=True, dynamic=False)
        given = x.clone().requires_grad_()
        trained = [given, *layer.parameters()]
        times[name] = reference.milliseconds(
            lambda layer=layer, given=given, trained=trained: torch.autograd.grad(layer(given), trained, dy)
        )
    print(times)
    mine = times["fp8, weight gradient in float8"]
    assert mine < 0.75 * times["bfloat16"], times
    assert times["fp8, weight gradient in bfloat16"] < 0.85 * times["bfloat16"], times
    assert mine == min(times.values()), times


class MLP(torch.nn.Module):
    def __init__(self, hidden: int, inner: int, maker: Any) -> None:
        super().__init__()
        self.norm = torch.nn.RMSNorm(hidden)
        sizes = (hidden, inner), (hidden, inner), (inner, hidden)
        self.gate, self.up, self.down = (maker(torch.nn.Linear(*size, bias=False)) for size in sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))
