"""Linear attention and short convolutions over packed documents against transformers' own code, a document at a time."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from fxtune.kernels.linear_attention import CHUNK, document_chunks, linear_attention
from fxtune.kernels.short_convolution import short_convolution
from fxtune.upstream import fla

LENGTHS = (1, 2, 63, 64, 65, 7)
HEADS, KEYS, VALUES = 4, 16, 8


def bounds(lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    return cu_seqlens, document_chunks(cu_seqlens, sum(lengths))


def drawn(which: str, lengths: tuple[int, ...] = LENGTHS) -> list[Tensor]:
    """q, k, v, g and (but for a scan) beta. One key head serves two value heads, but in `kda`."""
    torch.manual_seed(0)
    tokens, key_heads = sum(lengths), HEADS if which == "kda" else HEADS // 2
    q, k = (F.normalize(torch.randn(tokens, key_heads, KEYS), dim=-1) for _ in range(2))
    g = -3 * torch.rand(tokens, HEADS, *([KEYS] if which == "kda" else []))
    g[3] = -20
    values = [q, k, torch.randn(tokens, HEADS, VALUES), g]
    return values if which == "scan" else [*values, torch.rand(tokens, HEADS)]


def plain(which: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None = None) -> Tensor:
    """The same for one document by transformers; of a scan by its definition as attention."""
    q, k = (of.repeat_interleave(HEADS // of.shape[1], 1) for of in (q, k))
    if beta is None:
        sums = g.cumsum(0)
        decay = (sums[:, None] - sums[None]).masked_fill(
            torch.ones(len(g), len(g)).triu(1).bool()[..., None], -torch.inf
        )
        return torch.einsum("tsh,shv->thv", torch.einsum("thk,shk->tsh", q, k) * decay.exp(), v) * KEYS**-0.5
    if which == "kda":
        from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention as reference
    else:
        from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule as reference
    inputs = (of.unsqueeze(0) for of in (q, k, v))
    return inspect.unwrap(reference)(*inputs, g=g.unsqueeze(0), beta=beta.unsqueeze(0))[0][0]


@pytest.mark.parametrize("which", ["delta", "kda", "scan"])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_packed_documents_have_the_results_and_gradients_of_each_alone(which, is_compiled):
    given = [of.requires_grad_() for of in drawn(which)]
    cu_seqlens, chunks = bounds(LENGTHS)
    run = torch.compile(linear_attention, fullgraph=True) if is_compiled else linear_attention
    beta = given[4] if len(given) > 4 else None
    found = run(*given[:4], beta, KEYS**-0.5, cu_seqlens, chunks)
    expected = torch.cat([plain(which, *one) for one in zip(*(of.split(LENGTHS) for of in given), strict=True)])
    seed = torch.randn_like(expected)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for mine, other in zip(
        torch.autograd.grad(found, given, seed), torch.autograd.grad(expected, given, seed), strict=True
    ):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("which", ["delta", "kda", "scan"])
def test_the_order_of_documents_changes_no_bit(which):
    given = drawn(which)
    there = [torch.cat(of.split(LENGTHS)[::-1]) for of in given]
    results = []
    for values, lengths in ((given, LENGTHS), (there, LENGTHS[::-1])):
        q, k, v, g, *beta = values
        results.append(linear_attention(q, k, v, g, beta[0] if beta else None, 1.0, *bounds(lengths)))
    assert torch.equal(results[0], torch.cat(results[1].split(LENGTHS[::-1])[::-1]))


@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_short_convolution_reads_no_token_of_another_document(silu, has_bias):
    torch.manual_seed(0)
    given = [torch.randn(sum(LENGTHS), 12), torch.randn(12, 4), *([torch.randn(12)] if has_bias else [])]
    x, weight, *bias = given = [of.requires_grad_() for of in given]
    found = short_convolution(x, weight, bias[0] if bias else None, silu, *bounds(LENGTHS))
    expected = []
    for document in x.split(LENGTHS):
        y = F.conv1d(document.T, weight[:, None], *bias, padding=3, groups=12)[:, : len(document)].T
        expected.append(F.silu(y) if silu else y)
    seed = torch.randn_like(found)
    torch.testing.assert_close(found, torch.cat(expected), rtol=1e-5, atol=1e-5)
    gradients = (torch.autograd.grad(of, given, seed) for of in (found, torch.cat(expected)))
    for mine, other in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


def test_operators_keep_the_rules_of_custom_operators():
    cu_seqlens, chunks = bounds(LENGTHS)
    for which in ("delta", "kda", "scan"):
        q, k, v, g, *beta = (of.requires_grad_() for of in drawn(which))
        torch.library.opcheck(
            torch.ops.fxtune.linear_attention.default,
            (q, k, v, g, beta[0] if beta else None, 0.25, cu_seqlens, chunks),
        )
    x, weight = (torch.randn(size, 12).requires_grad_() for size in (sum(LENGTHS), 4))
    torch.library.opcheck(torch.ops.fxtune.short_convolution.default, (x, weight.T, None, True, cu_seqlens, chunks))


def test_chunks_name_their_document_and_their_place():
    _, chunks = bounds((1, 64, 65, 0, 130))
    assert chunks[:7].tolist() == [[0, 0], [1, 0], [2, 0], [2, 1], [4, 0], [4, 1], [4, 2]]
    assert (chunks[7:, 1] * 64 >= 130).all()
    assert len(chunks) == 260 // 64 + 5


def test_forward_flops_are_those_of_transformers_chunks():
    """Torch does not count the two triangular systems that transformers solves: [64, 64] matrices times k and times v."""
    tokens = 2 * CHUNK
    with FlopCounterMode(display=False) as counter:
        q, k, *others = drawn("delta", (tokens,))
        plain("delta", *(of.repeat_interleave(2, 1) for of in (q, k)), *others)
    solved = 2 * CHUNK * (KEYS + VALUES)
    assert counter.get_total_flops() == tokens * HEADS * (fla.flops("delta", KEYS, VALUES)[0] - solved)


def test_forward_flops_of_a_scan_are_those_of_its_chunk():
    q, k, v, state = (torch.rand(*of) for of in ((CHUNK, KEYS), (CHUNK, KEYS), (CHUNK, VALUES), (KEYS, VALUES)))
    with FlopCounterMode(display=False) as counter:
        assert (q @ k.T @ v + q @ state).shape == v.shape
        assert (state + k.T @ v).shape == state.shape
    assert counter.get_total_flops() == CHUNK * fla.flops("scan", KEYS, VALUES)[0]


@pytest.mark.parametrize("which", ["delta", "kda", "scan"])
def test_torch_counts_the_operators_flops(which):
    given = [of.requires_grad_() for of in drawn(which)]
    forward, again = (sum(LENGTHS) * HEADS * flops for flops in fla.flops(which, KEYS, VALUES))
    with FlopCounterMode(display=False) as counter:
        found = linear_attention(*given[:4], given[4] if len(given) > 4 else None, 1.0, *bounds(LENGTHS))
        assert counter.get_total_flops() == forward
        found.sum().backward()
    assert counter.get_total_flops() == 3 * forward + again
