"""fla-core's kernels as fxtune calls them: errors against float64, a token at a time; bits; waits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fxtune.kernels.linear_attention import document_chunks, linear_attention
from fxtune.kernels.short_convolution import short_convolution

LENGTHS = (1, 2, 63, 64, 65, 130, 7)
TOKENS = sum(LENGTHS)
BOUND = 1e-2
"""Norm of the error by norm of the result. bfloat16's rounding gives 2e-3 to 5e-3 (an H200, Triton 3.6 and tilelang)."""

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def kernels():
    pytest.importorskip("fla")


def drawn(which: str, decay: float, width: int = 128) -> list[Tensor]:
    torch.manual_seed(0)
    key_heads, heads = (4 if which == "kda" else 2), 4
    q, k = (F.normalize(torch.randn(TOKENS, key_heads, width, device="cuda"), dim=-1).bfloat16() for _ in range(2))
    v = torch.randn(TOKENS, heads, width, device="cuda").bfloat16()
    g = -decay * torch.rand(TOKENS, heads, *[width] * (which == "kda"), device="cuda") ** 4
    given = [q, k, v, g]
    return given if which == "scan" else [*given, torch.rand(TOKENS, heads, device="cuda").bfloat16()]


def places() -> tuple[Tensor, Tensor]:
    bounds = torch.tensor([0, *LENGTHS], device="cuda").cumsum(0).int()
    return bounds, document_chunks(bounds, TOKENS)


def exact(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None = None) -> Tensor:
    q, k = (of.repeat_interleave(v.shape[1] // of.shape[1], 1) for of in (q, k))
    out, at = [], 0
    for length in LENGTHS:
        state = v.new_zeros(v.shape[1], k.shape[2], v.shape[2])
        for t in range(at, at + length):
            factor = g[t].exp()
            state = state * (factor[..., None] if factor.ndim == 2 else factor[:, None, None])
            new = v[t]
            if beta is not None:
                new = beta[t][:, None] * (new - torch.einsum("hkv,hk->hv", state, k[t]))
            state = state + k[t][..., None] * new[:, None]
            out.append(torch.einsum("hkv,hk->hv", state, q[t]))
        at += length
    return torch.stack(out) * k.shape[2] ** -0.5


def run(given: list[Tensor]) -> Tensor:
    q, k, v, g, *beta = given
    return linear_attention(q, k, v, g, beta[0] if beta else None, q.shape[2] ** -0.5, *places())


@pytest.mark.parametrize("decay", [0.1, 20.0])
@pytest.mark.parametrize("which", ["delta", "scan", "kda"])
def test_results_and_gradients_are_those_of_float64(which, decay):
    given = [of.requires_grad_() for of in drawn(which, decay)]
    copies = [of.detach().double().requires_grad_() for of in given]
    found, expected = run(given), exact(*copies)
    seed = torch.randn_like(found)
    pairs = [(found, expected)]
    gradients = torch.autograd.grad(found, given, seed), torch.autograd.grad(expected, copies, seed.double())
    for mine, other in [*pairs, *zip(*gradients, strict=True)]:
        assert (mine.double() - other).norm() <= BOUND * other.norm()


@pytest.mark.parametrize("which", ["delta", "scan", "kda"])
def test_a_second_run_has_the_same_bits_whatever_lies_in_memory(which):
    given = [of.requires_grad_() for of in drawn(which, 1.0)]

    def results() -> list[Tensor]:
        found = run(given)
        return [found, *torch.autograd.grad(found, given, torch.ones_like(found))]

    first = results()
    poison = torch.full((64 << 20,), float("nan"), device="cuda")
    del poison
    assert all(map(torch.equal, first, results()))


@pytest.mark.parametrize("which", ["delta", "scan", "kda"])
def test_the_kernels_results_are_what_the_compiler_expects(which):
    q, k, v, g, *beta = drawn(which, 1.0)
    inputs = (q, k, v, g, beta[0] if beta else None, 1.0, *places())
    torch.library.opcheck(torch.ops.fxtune.linear_attention.default, inputs, test_utils=("test_faketensor",))


def test_the_host_waits_for_nothing():
    given = [of.requires_grad_() for of in drawn("delta", 1.0)]
    bounds, chunks = places()
    q, k, v, g, beta = given
    seed = torch.ones_like(v)

    def step() -> None:
        torch.autograd.grad(linear_attention(q, k, v, g, beta, 1.0, bounds, chunks), given, seed)
        document_chunks(bounds, TOKENS)

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_convolution_takes_strided_rows_and_equals_torch():
    channels = 256
    x = torch.randn(channels, TOKENS, device="cuda").bfloat16().t().requires_grad_()
    weight = torch.randn(channels, 4, device="cuda").bfloat16().requires_grad_()
    found = short_convolution(x, weight, None, True, *places())
    wide, filters = (of.detach().double().requires_grad_() for of in (x, weight))
    alone = [F.conv1d(F.pad(one.t()[None], (3, 0)), filters[:, None], groups=channels) for one in wide.split(LENGTHS)]
    expected = torch.cat([F.silu(one)[0].t() for one in alone])
    seed = torch.randn_like(expected)
    gradients = torch.autograd.grad(found, (x, weight), seed.bfloat16())
    for mine, other in zip(
        (found, *gradients), (expected, *torch.autograd.grad(expected, (wide, filters), seed)), strict=True
    ):
        assert (mine.double() - other).norm() <= BOUND * other.norm()
