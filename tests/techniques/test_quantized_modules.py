"""Linears whose weights are stored in 4 or 8 bits: exact for their dequantized weights, as small as planned."""

from __future__ import annotations

import pytest
import torch
from support.architectures import CPU
from support.quantized import kinds

from fxtune.techniques.quantized_modules import bytes_per_weight, dequantized, is_quantized, quantized, stored_bytes


def linear(bias: bool = False, dtype: torch.dtype = torch.float32) -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(512, 384, bias=bias).to(dtype)


def stored(kind: str, source: torch.nn.Linear, compute: torch.dtype = torch.float32) -> torch.nn.Linear:
    return quantized(source, kind, compute, CPU.device)


@kinds
@pytest.mark.parametrize("bias", [False, True])
def test_a_quantized_linear_computes_exactly_with_its_dequantized_weight(kind, bias):
    source = linear(bias)
    made = stored(kind, source)
    assert is_quantized(made)
    assert not is_quantized(source)
    weight = dequantized(made)
    lost = ((weight - source.weight).norm() / source.weight.norm()).item()
    assert 0 < lost < {"nf4": 0.1, "int8": 0.01}[kind]  # uniform weights lose less than normal ones
    ours, plain = (
        torch.randn(2, 5, 512, generator=torch.Generator().manual_seed(1), requires_grad=True) for _ in range(2)
    )
    output = made(ours)
    expected = torch.nn.functional.linear(plain, weight, source.bias)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    output.cos().sum().backward()
    expected.cos().sum().backward()
    torch.testing.assert_close(ours.grad, plain.grad, rtol=1e-5, atol=1e-5)
    assert not any(parameter.requires_grad for parameter in made.parameters())


@kinds
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
def test_a_quantized_linear_computes_in_its_dtype_and_returns_the_input_dtype(kind, given):
    made = stored(kind, linear(True, torch.bfloat16), torch.bfloat16)
    assert dequantized(made).dtype is torch.bfloat16
    inputs = torch.randn(3, 512, dtype=given, requires_grad=True)
    output = made(inputs)
    output.sum().backward()
    assert output.dtype is inputs.grad.dtype is given
    assert torch.equal(output, output.bfloat16().to(given))


@kinds
def test_a_quantized_linear_takes_the_planned_bytes_and_keeps_no_16_bit_weight(kind):
    source = torch.nn.Linear(4096, 256, bias=False)
    made = stored(kind, source)
    planned = bytes_per_weight(kind) * source.weight.numel()
    assert stored_bytes(made) == pytest.approx(planned, rel=0.003)  # plus tables of 16 and 256 values
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        made(torch.randn(2, 4096, requires_grad=True))
    assert not [one for one in kept if type(one) is torch.Tensor and one.is_floating_point() and one.numel() > 4096]


def test_bytes_per_weight_equal_the_paper():
    assert bytes_per_weight("nf4") * 8 == pytest.approx(4.127, abs=1e-3)  # QLoRA, section 3
    assert bytes_per_weight("int8") == pytest.approx(1.001, abs=1e-4)


@kinds
def test_quantized_linears_compile_without_graph_breaks(kind):
    made = stored(kind, linear(True))
    compiled = torch.compile(made.forward, fullgraph=True, dynamic=False, backend="aot_eager")
    ours, plain = (
        torch.randn(6, 512, generator=torch.Generator().manual_seed(1), requires_grad=True) for _ in range(2)
    )
    compiled(ours).cos().sum().backward()
    made(plain).cos().sum().backward()
    torch.testing.assert_close(ours.grad, plain.grad)
