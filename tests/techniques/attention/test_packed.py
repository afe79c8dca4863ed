"""Attention over packed rows: each kernel gets the documents of a row, or refuses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.attention import unchecked
from torch.nn import functional as F

from fxtune.errors import ConfigError
from fxtune.kernels.flash4 import Options
from fxtune.techniques.attention import packed as packed_attention
from fxtune.techniques.attention.backends import cudnn, flash4, sdpa
from fxtune.techniques.attention.inputs import model_inputs
from fxtune.techniques.pipeline import make_probe


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sinks_of_any_dtype_reach_flash4_in_bfloat16(dtype):
    q, k, v = torch.randn(3, 1, 5, 2, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    sinks, bounds = torch.tensor([0.1, 1.7], requires_grad=True), torch.tensor([0, 5], dtype=torch.int32)
    out = flash4.attend(q, k, v, Options(bounds, 5, 0.3, 0, 0.0, sinks))
    rounded = sinks.detach().bfloat16()
    assert torch.equal(out, torch.ops.fxtune.flash4(q, k, v, None, 5, 0.3, 0, 0.0, rounded)[0])
    assert not torch.equal(rounded.float(), sinks)
    out.sum().backward()
    assert sinks.grad.dtype is torch.float32


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "mistral_sliding"])
def test_a_plain_call_with_packed_positions_isolates_documents(family):
    """In a user's forward pass without cu_seqlens, transformers builds the mask."""
    models = [unchecked(backend, family).eval() for backend in ("eager", "flash4")]
    probe = {name: make_probe(models[0])[name] for name in ("input_ids", "position_ids", "use_cache")}
    with torch.no_grad():
        torch.testing.assert_close(models[1](**probe).logits, models[0](**probe).logits)


@pytest.mark.parametrize(
    ("implementation", "given"),
    [
        ("sdpa", False),
        ("flex_attention", False),
        ("fxtune_fa4", True),
        ("flash_attention_3", True),
        ("org/kernel@0", True),
    ],
)
def test_which_backends_receive_cu_seqlens(implementation, given):
    """transformers would find the documents of one row, but not of two."""
    model = torch.nn.Identity()
    model.config = type(
        "Config", (), {"_attn_implementation": implementation, "model_type": "llama", "architectures": []}
    )
    rows, bounds = torch.zeros(2, 5, dtype=torch.long), torch.tensor([0, 5, 10], dtype=torch.int32)
    inputs = model_inputs(model, rows, rows, bounds)
    assert ("cu_seq_lens_q" in inputs) == given
    assert ("attention_mask" in inputs) == implementation.startswith("fxtune")
    if given:
        assert inputs["cu_seq_lens_k"] is bounds
        assert inputs["max_length_q"] == 5


def test_a_layer_that_drops_cu_seqlens_is_an_error():
    model = unchecked("flash4", "llama")
    probe = {name: value for name, value in make_probe(model).items() if not name.startswith(("cu_", "max_"))}
    with pytest.raises(ConfigError, match="does not pass the documents' bounds"):
        model(**probe)


def test_packed_documents_of_gpt_oss_as_each_alone_in_plain_transformers():
    """Sinks, a sliding window in every second layer, and rows whose documents transformers' mask would not separate."""
    plain, mine = (unchecked(backend, "gpt_oss").eval() for backend in ("eager", "flash4"))
    for model in (plain, mine):
        for number, (name, weight) in enumerate(model.named_parameters()):
            weight.data.normal_(std=1.0 if "sinks" in name else 0.3, generator=torch.Generator().manual_seed(number))
    lengths = (3, 17, 40)
    ids = torch.randint(2, 100, (1, sum(lengths)), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)
    bounds = torch.tensor([0, 3, 20, 60, 60], dtype=torch.int32)
    found = mine(**model_inputs(mine, ids, positions, bounds)).logits
    wanted = torch.cat([plain(input_ids=document, use_cache=False).logits for document in ids.split(lengths, 1)], 1)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    losses = [logits.float().logsumexp(-1).sum() for logits in (found, wanted)]
    for ours, theirs in zip(
        *(
            torch.autograd.grad(loss, list(model.parameters()))
            for loss, model in zip(losses, (mine, plain), strict=True)
        ),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-4 * theirs.abs().max().item(), rtol=1e-3)


@pytest.mark.parametrize(
    ("what", "match"),
    [
        ({"position_bias": torch.zeros(4)}, "position bias"),
        ({"dropout": 0.1}, "no dropout"),
    ],
)
def test_unsupported_arguments_of_the_kernel_are_errors(what, match):
    from transformers import AttentionInterface

    flash4.FLASH4.prepare()
    qkv = torch.zeros(3, 1, 4, 6, 8)
    with pytest.raises(ConfigError, match=match):
        AttentionInterface()["fxtune_fa4"](
            torch.nn.Identity(),
            *qkv,
            packed_attention.no_mask(torch.zeros(1, 6)),
            cu_seq_lens_q=torch.tensor([0, 6], dtype=torch.int32),
            **what,
        )


def test_cudnn_runs_packed_rows_document_by_document(monkeypatch):
    """The loop over documents, with torch's attention in place of cuDNN's."""
    lengths = []

    def rows(q, k, v, scale):
        lengths.append(q.shape[1])
        return F.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, scale=scale, enable_gqa=True
        ).transpose(1, 2)

    monkeypatch.setattr(cudnn, "_rows", rows)
    cudnn.CUDNN.prepare()
    q, k, v = (torch.randn(2, 80, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    cu_seqlens = torch.tensor([0, 1, 70, 80, 159, 160, 160, 160], dtype=torch.int32)
    out = cudnn.attend(q, k, v, Options(cu_seqlens, 80, 0.3, 0, 0.0))
    expected = flash4.attend(q, k, v, Options(cu_seqlens, 80, 0.3, 0, 0.0))
    torch.testing.assert_close(out, expected)
    for ours, theirs in zip(
        torch.autograd.grad(out.sin().sum(), (q, k, v)),
        torch.autograd.grad(expected.sin().sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)
    assert lengths == [64, 128, 64, 128, 64]


@given(st.integers(1, 2**20))
def test_cudnn_pads_to_few_lengths(length):
    padded = cudnn.padded_length(length)
    assert padded >= length
    assert padded == cudnn.padded_length(padded)
    assert padded - length < max(64, length / cudnn.STEPS * 1.01)


def test_torch_flash_attention_is_called_by_its_schema():
    """On torch's meta device: the operator's arguments and shapes, without its kernel."""
    q, k, v = (torch.randn(2, 80, heads, 16, device="meta", dtype=torch.bfloat16) for heads in (4, 2, 2))
    cu_seqlens = torch.empty(9, dtype=torch.int32, device="meta")
    for window in (0, 5):
        assert sdpa.attend(q, k, v, Options(cu_seqlens, 80, 0.3, window, 0.0)).shape == (2, 80, 4, 16)
    assert sdpa.attend(q, k, v[..., :8], Options(cu_seqlens, 80, 0.3, 0, 0.0)).shape == (2, 80, 4, 8)
    keys, values = (torch.randn(1, 200, 2, 16, device="meta", dtype=torch.bfloat16) for _ in "kv")
    options = Options(cu_seqlens, 80, 0.3, 5, 0.0, cu_seqlens_k=cu_seqlens)
    assert sdpa.attend(q, keys, values, options).shape == (2, 80, 4, 16)
    assert cudnn._rows(q, k, v, 0.3).shape == (2, 80, 4, 16)
