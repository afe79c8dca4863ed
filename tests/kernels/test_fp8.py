"""fp8: what quantising loses and keeps, the two products of a frozen linear, and groups of them with adapters."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from fxtune.kernels import fp8
from fxtune.kernels.fused_lora import lora_linear, lora_mlp

STEP = 1 / 16
"""Half a step of three bits of mantissa, relative to the number."""


def wide(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return fp8.dequantize_rows(codes, scales, torch.float32)


def weight(outward: int, inward: int, seed: int = 0, transpose: bool = True) -> tuple[fp8.Weight, torch.Tensor]:
    """A weight in fp8, and its dequantized values in float32. Its rows differ in size by up to 100 times."""
    draw = torch.Generator().manual_seed(seed)
    drawn = 0.02 * torch.randn(outward, inward, generator=draw)
    if not transpose:
        drawn *= torch.logspace(-1, 1, outward)[:, None]
    made = fp8.quantize_weight(drawn, transpose)
    return made, wide(made.codes, made.scales)


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return ((one.float() - other.float()).norm() / other.float().norm()).item()


@settings(max_examples=60)
@example(3, 1, -88, False, 1)  # a row next to the smallest scale
@given(st.integers(1, 5), st.integers(1, 300), st.integers(-90, 90), st.booleans(), st.integers(0, 2**31))
def test_quantizing_keeps_sign_and_three_bits(rows, width, magnitude, powers, seed):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=draw) * 2.0**magnitude
    codes, scales = fp8.quantize_rows(x, powers)
    assert (codes.dtype, codes.shape, scales.dtype, scales.shape) == (
        torch.float8_e4m3fn,
        x.shape,
        torch.float32,
        (rows, 1),
    )
    found = wide(codes, scales)
    # The smallest step of e4m3 is 2^-9 of a scale.
    assert ((found - x).abs() <= x.abs() * STEP * 1.0001 + scales * 2.0**-10).all()
    assert (found * x >= 0).all()
    largest = x.abs().amax(1, keepdim=True)
    assert (scales * 448 >= largest * 0.9999).all()
    assert (scales * 448 <= largest.clamp(min=fp8.SMALLEST * 448) * (2 if powers else 1) * 1.0001).all()
    if powers:
        assert torch.equal(torch.frexp(scales)[0], torch.full_like(scales, 0.5))
        again, scales_again = fp8.quantize_rows(found, powers)
        assert torch.equal(wide(again, scales_again), found), "what is there already is not moved"


def test_zeros_and_nonfinite_numbers_stay():
    x = torch.randn(4, 64)
    x[0], x[1, 3], x[2, 5] = 0, float("nan"), float("inf")
    codes, scales = fp8.quantize_rows(x)
    made, _ = weight(32, 64)
    product = fp8.scaled_mm((codes, scales), made.codes, made.scales)
    assert not product[0].any()
    assert product.isfinite().all(1).tolist() == [True, False, False, True]


def test_rows_with_gaps_and_no_rows():
    whole = torch.randn(6, 100)
    for result, expected in zip(
        fp8.quantize_rows(whole[:, 8:72]), fp8.quantize_rows(whole[:, 8:72].contiguous()), strict=True
    ):
        assert torch.equal(result.float(), expected.float())
    made, _ = weight(32, 64)
    assert fp8.scaled_mm(fp8.quantize_rows(torch.empty(0, 64)), made.codes, made.scales).shape == (0, 32)


def test_a_weight_and_its_transpose_hold_the_same_numbers():
    made, stands_for = weight(96, 160)
    assert apart(wide(made.back, made.back_scales).t(), stands_for) < 1e-3
    assert apart(stands_for, 0.02 * torch.randn(96, 160, generator=torch.Generator().manual_seed(0))) < 0.03
    assert torch.equal(fp8.dequantize_weight(made.codes, made.scales, torch.bfloat16).float(), stands_for), (
        "bfloat16 holds them"
    )
    assert sum(tensor.numel() * tensor.element_size() for tensor in made) == 2 * 96 * 160 + 4 * (96 + 160)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_linear_is_exact_but_for_rounding_its_input(dtype):
    made, stands_for = weight(96, 160)
    x = torch.randn(3, 50, 160, dtype=dtype, requires_grad=True)
    dy = torch.randn(3, 50, 96, dtype=dtype)
    y = fp8.linear(x, made)
    y.backward(dy)
    assert y.dtype is x.grad.dtype is dtype
    for found, given_, factor in ((y, x.detach(), stands_for.t()), (x.grad, dy, stands_for)):
        rounded = wide(*fp8.quantize_rows(given_.flatten(0, 1))).view(given_.shape)
        assert apart(found, rounded @ factor) < 4e-3, "bfloat16's rounding, no more"
        assert 0.01 < apart(found, given_.float() @ factor) < 0.04


def test_without_its_transpose_a_linear_has_the_same_output_and_a_gradient_of_the_same_accuracy():
    made, stands_for = weight(96, 160, transpose=False)
    assert made.back is made.back_scales is None
    both = fp8.weight_of(made.codes.view(fp8.E4M3), made.scales.t())
    x, dy = torch.randn(150, 160, requires_grad=True), torch.randn(150, 96)
    y = fp8.linear(x, made)
    assert torch.equal(y, fp8.linear(x, both))
    (found,) = torch.autograd.grad(y, x, dy)
    scaled = wide(*fp8.quantize_rows(dy * made.scales))
    assert apart(found, scaled @ wide(made.codes, torch.ones(96))) < 4e-3, "bfloat16's rounding, no more"
    (kept,) = torch.autograd.grad(fp8.linear(x, both), x, dy)
    exact = dy @ stands_for
    assert apart(found, exact) < 1.2 * apart(kept, exact)


def test_without_its_transpose_a_linear_passes_opcheck_and_counts_its_flops():
    from torch.utils.flop_counter import FlopCounterMode

    made, _ = weight(96, 160, transpose=False)
    given_ = (torch.randn(5, 160, requires_grad=True), made.codes.t(), made.scales, None, None)
    torch.library.opcheck(torch.ops.fxtune.fp8_linear.default, given_)
    torch.library.opcheck(torch.ops.fxtune.fp8_linear_backward.default, (torch.randn(5, 96), *given_[1:3]))
    with FlopCounterMode(display=False) as counter:
        fp8.linear(torch.randn(3, 5, 160, requires_grad=True), made).sum().backward()
    assert counter.get_total_flops() == 2 * 2 * 15 * 96 * 160


def test_rounding_noise_averages_out():
    """Rounding errors of e4m3 average out over rows: the mean of many products is more accurate than each of them."""
    made, stands_for = weight(32, 64)
    x = torch.randn(4096, 64) + 0.5
    exact = x @ stands_for.t()
    error = fp8.linear(x, made).float() - exact
    assert error.mean(0).norm() < 0.1 * error.norm(dim=1).mean()


def test_only_the_weight_is_kept_for_the_backward_pass():
    made, _ = weight(96, 160)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        fp8.linear(torch.randn(40, 160, requires_grad=True), made)
    assert {tensor.untyped_storage().data_ptr() for tensor in kept} <= {
        tensor.untyped_storage().data_ptr() for tensor in made
    }


def test_operator_passes_opcheck_and_compiles():
    made, _ = weight(96, 160)
    given_ = (torch.randn(5, 160, requires_grad=True), made.codes.t(), made.scales, made.back.t(), made.back_scales)
    torch.library.opcheck(torch.ops.fxtune.fp8_linear.default, given_)
    compiled = torch.compile(lambda x: fp8.linear(x, made).cos(), fullgraph=True, backend="aot_eager")
    ours, plain = (
        torch.randn(6, 160, generator=torch.Generator().manual_seed(1), requires_grad=True) for _ in range(2)
    )
    compiled(ours).sum().backward()
    fp8.linear(plain, made).cos().sum().backward()
    assert torch.equal(ours.grad, plain.grad)


def test_flops_are_counted():
    from torch.utils.flop_counter import FlopCounterMode

    made, _ = weight(96, 160)
    with FlopCounterMode(display=False) as counter:
        fp8.linear(torch.randn(3, 5, 160, requires_grad=True), made).sum().backward()
    assert counter.get_total_flops() == 2 * 2 * 15 * 96 * 160


def adapters(inward: int, outs: tuple[int, ...], seed: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    return (
        [torch.randn(8, inward, generator=draw).mul_(0.1).requires_grad_() for _ in outs],
        [torch.randn(out, 8, generator=draw).mul_(0.1).requires_grad_() for out in outs],
    )


def plain(x: torch.Tensor, frozen: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return x @ frozen.t() + 2 * (x @ a.t() @ b.t())


def test_adapters_of_a_group_are_not_quantized():
    made, stands_for = weight(96, 160)
    a, b = adapters(160, (64, 32), 1)
    x = torch.randn(50, 160)
    y = lora_linear(x, a, b, list(made), [2.0, 2.0], "fp8")
    exact = torch.cat([plain(x, part, *pair) for part, *pair in zip(stands_for.split([64, 32]), a, b, strict=True)], 1)
    base = fp8.linear(x, made)
    torch.testing.assert_close(y - base, exact - x @ stands_for.t(), rtol=1e-3, atol=1e-4)
    assert apart(y, exact) < 0.04


@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize(
    ("act", "keep", "tiles"), [("silu", True, 1), ("silu", False, 1), ("gelu_pytorch_tanh", False, 3)]
)
def test_an_mlp_with_adapters_is_near_the_dequantized_one(act, keep, tiles, transpose):
    (up, up_weight), (down, down_weight) = weight(2 * 96, 64, transpose=transpose), weight(64, 96, 3, transpose)
    if not transpose:
        up, down = up[:2], down[:2]
    (a, b), (a_down, b_down) = adapters(64, (96, 96), 1), adapters(96, (64,), 2)
    a, b = a + a_down, b + b_down
    x = torch.randn(2, 25, 64, requires_grad=True)
    dy = torch.randn(2, 25, 64)
    y = lora_mlp(x, a, b, list(up), list(down), [2.0] * 3, "fp8", "fp8", act, keep, tiles)
    found = torch.autograd.grad(y, [x, *a, *b], dy)
    function = F.silu if act == "silu" else lambda gate: F.gelu(gate, approximate="tanh")
    gate, up_half = up_weight.chunk(2)
    inner = function(plain(x, gate, a[0], b[0])) * plain(x, up_half, a[1], b[1])
    exact = plain(inner, down_weight, a[2], b[2])
    assert apart(y, exact) < 0.05
    for mine, theirs in zip(found, torch.autograd.grad(exact, [x, *a, *b], dy), strict=True):
        assert mine.dtype is theirs.dtype
        assert apart(mine, theirs) < 0.05
