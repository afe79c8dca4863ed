"""The RoPE operators against transformers' own function: values, gradients, layouts, and in compiled layers."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.architectures import FAMILIES, SIZES, built, lora, random_model
from support.cases import slow_but
from torch.nn import functional as F

from fxtune.facts.options import Policy, Switch
from fxtune.kernels.frozen_base import Dense, augment
from fxtune.kernels.rotary import apply_rotary, qkv
from fxtune.models.structure import decoder_layers
from fxtune.techniques.attention.inputs import model_inputs
from fxtune.techniques.liger.technique import Liger
from fxtune.techniques.pipeline import Pipeline
from fxtune.techniques.rope import Rope

ROWS, LENGTH, HEADS, KV, DIM = 2, 11, 4, 2, 16


@pytest.fixture(autouse=True)
def _qwen2(monkeypatch):
    monkeypatch.setitem(FAMILIES, "qwen2", {"model_type": "qwen2", **SIZES})  # its q, k and v have biases


def angles(
    rows: int = ROWS, length: int = LENGTH, width: int = DIM, dtype: torch.dtype = torch.float32, factor: float = 1.0
):
    """cos and sin as a model makes them, for packed positions, scaled as YaRN scales them."""
    positions = torch.arange(length)[None].repeat(rows, 1) % 7
    turned = positions[..., None] * 1e4 ** -(torch.arange(0, width, 2) / width)
    turned = torch.cat([turned, turned], -1)
    return (turned.cos() * factor).to(dtype), (turned.sin() * factor).to(dtype)


def theirs(q, k, cos, sin):
    """RoPE by transformers, with the function that also rotates only a part of each head."""
    from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb

    return apply_rotary_pos_emb(q, k, cos, sin)


def results(function, q, k, cos, sin, dtype):
    """Rotated q and k and their gradients, computed in `dtype` from the same numbers."""
    leaves = [x.to(dtype).requires_grad_() for x in (q, k)]
    out = function(*(x.transpose(1, 2) for x in leaves), cos.to(dtype), sin.to(dtype))
    above = [torch.linspace(-1, 1, x.numel()).view(x.shape).to(q.dtype).to(dtype) for x in out]
    return [x.double() for x in (*out, *torch.autograd.grad(out, leaves, above))]


def states(dtype=torch.float32, rows=ROWS, length=LENGTH, heads=HEADS, kv=KV, dim=DIM):
    generator = torch.Generator().manual_seed(rows + length + heads)
    return [torch.randn(rows, length, number, dim, generator=generator).to(dtype) for number in (heads, kv)]


@settings(max_examples=40)
@given(
    rows=st.integers(1, 3),
    length=st.integers(0, 9),
    heads=st.integers(1, 5),
    kv=st.integers(1, 3),
    half=st.integers(1, 6),
    rest=st.integers(0, 5),
    shared=st.booleans(),
    factor=st.sampled_from([1.0, 1.2079]),
)
def test_float32_results_equal_transformers_own(rows, length, heads, kv, half, rest, shared, factor):
    q, k = states(torch.float32, rows, length, heads, kv, 2 * half + rest)
    cos, sin = angles(1 if shared else rows, length, 2 * half, factor=factor)
    for mine, other in zip(
        *(results(function, q, k, cos, sin, torch.float32) for function in (apply_rotary, theirs)), strict=True
    ):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_results_are_nearer_to_float64_than_transformers_own(dtype):
    q, k = states(dtype, length=200)
    cos, sin = angles(length=200, dtype=dtype, factor=1.2079)
    exact = results(theirs, q, k, cos, sin, torch.float64)
    mine, other = (results(function, q, k, cos, sin, dtype) for function in (apply_rotary, theirs))
    for value, usual, wanted in zip(mine, other, exact, strict=True):
        assert (value - wanted).norm() < 0.8 * (usual - wanted).norm()
        torch.testing.assert_close(value, wanted, rtol=torch.finfo(dtype).eps, atol=1e-6)  # one rounding


def test_results_have_the_layout_that_attention_reads():
    q, k = states()
    for x in apply_rotary(q.transpose(1, 2), k.transpose(1, 2), *angles()):
        assert x.transpose(1, 2).is_contiguous()
    heads_first = [x.transpose(1, 2).contiguous() for x in (q, k)]
    for mine, other in zip(
        apply_rotary(*heads_first, *angles()), apply_rotary(q, k, *angles(), unsqueeze_dim=2), strict=True
    ):
        assert torch.equal(mine.transpose(1, 2), other)


def test_float32_angles_keep_16_bit_results():
    """Under autocast the angles are float32. transformers then returns float32 q and k, which attention must round."""
    q, k = states(torch.bfloat16)
    assert [x.dtype for x in apply_rotary(q, k, *angles(), unsqueeze_dim=2)] == [torch.bfloat16] * 2


@pytest.mark.parametrize("room", [0, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_qkv_splits_rotates_and_copies_one_product(dtype, room):
    """qkv() splits, rotates q and k, and copies v. Its gradient is one buffer with padding after each row."""
    x = torch.randn(ROWS, LENGTH, (HEADS + 2 * KV) * DIM).to(dtype)
    cos, sin = angles(dtype=dtype)
    found = []
    for function in (lambda x: qkv(x, cos, sin, HEADS, KV, room), apart):
        leaf = x.clone().requires_grad_()
        out = function(leaf)
        above = [torch.linspace(-1, 1, tensor.numel()).view(tensor.shape).to(dtype) for tensor in out]
        (gradient,) = torch.autograd.grad(out, leaf, above)
        found.append([*out, gradient])
    for mine, other in zip(*found, strict=True):
        assert torch.equal(mine, other)
    (gradient,) = torch.autograd.grad([tensor.sum() for tensor in qkv(leaf, cos, sin, HEADS, KV, room)], leaf)
    assert gradient.stride() == (LENGTH * (x.shape[-1] + room), x.shape[-1] + room, 1)


def apart(x):
    q, k, v = x.unflatten(-1, (-1, DIM)).split([HEADS, KV, KV], 2)
    return *apply_rotary(q, k, *angles(dtype=x.dtype), unsqueeze_dim=2), v


def test_operators_pass_opcheck():
    q, k = (x.double().requires_grad_() for x in states())
    cos, sin = (x.double() for x in angles())
    torch.library.opcheck(torch.ops.fxtune.rotary, (q, k, cos, sin, False))
    apart = q.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    torch.library.opcheck(torch.ops.fxtune.rotary, (apart, k, cos[:1], sin[:1], True))
    x = torch.randn(ROWS, LENGTH, (HEADS + 2 * KV) * DIM, dtype=torch.float64, requires_grad=True)
    torch.library.opcheck(torch.ops.fxtune.rotary_qkv, (x, cos, sin, HEADS, KV, 3))
    torch.autograd.gradcheck(lambda x: torch.ops.fxtune.rotary_qkv(x, cos[:, :2], sin[:, :2], HEADS, KV, 3), x[:, :2])


def with_rope(model, pipeline=None):
    pipeline = pipeline or Pipeline()
    pipeline.liger = Liger(enabled=True, kernels=["rope"])
    return built(pipeline, model)


def packed(model, length=48):
    """Three documents in a row."""
    return model_inputs(
        model, torch.arange(length)[None] % 128, torch.arange(length)[None] % 20, torch.tensor([0, 20, 40, length])
    )


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "phi", "phi3", "gemma3"])
def test_a_model_with_packed_rows_and_a_scaled_rope(family):
    """Logits and gradients equal those of the plain model, with YaRN in the families that allow it."""
    models = []
    for make in (built, lambda pipeline, model: with_rope(model, pipeline)):
        pipeline = Pipeline()
        if family in ("llama", "mistral", "qwen3"):
            pipeline.rope = Rope(enabled=True, factor=4.0)
        models.append(make(pipeline, random_model(family)))
    found = []
    for model in models:
        logits = model(**packed(model)).logits
        gradients = torch.autograd.grad(
            logits.logsumexp(-1).sum(),
            [parameter for parameter in model.parameters() if parameter.requires_grad],
            allow_unused=True,
        )
        found.append([logits, *(gradient for gradient in gradients if gradient is not None)])
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fused", slow_but([False, True], True))
def test_compiled_layers_share_one_graph_without_a_break(fused):
    if fused:
        model, plain = (adapted(lora(), "llama", rope=rope, num_hidden_layers=4) for rope in (True, False))
    else:
        model, plain = (
            make(random_model("llama", num_hidden_layers=4))
            for make in (with_rope, lambda one: built(Pipeline(), one))
        )
    graphs = []

    def counting(graph, inputs):
        graphs.append(sum("rotary" in str(node.target) for node in graph.graph.nodes))
        return graph

    for layer in decoder_layers(model):
        layer.compile(fullgraph=True, backend=counting)
    for _ in range(2):
        torch.testing.assert_close(model(**packed(model)).logits, plain(**packed(plain)).logits, rtol=1e-4, atol=1e-4)
    assert graphs == [1] * (1 + fused)  # over a frozen embedding the first layer's input takes no gradient


@pytest.mark.slow
def test_compiled_gradients():
    x, cos, sin = torch.randn(ROWS, LENGTH, (HEADS + 2 * KV) * DIM), *angles()
    found = []
    for run in (
        lambda x: qkv(x * 2, cos, sin, HEADS, KV, 16),
        torch.compile(lambda x: qkv(x * 2, cos, sin, HEADS, KV, 16), fullgraph=True),
    ):
        leaf = x.clone().requires_grad_()
        found.append(torch.autograd.grad(sum(tensor.square().sum() for tensor in run(leaf)), leaf)[0])
    torch.testing.assert_close(*found)


def adapted(pipeline, family, rope=True, **more):
    """A model whose adapters run fused, with our RoPE or transformers' own."""
    pipeline.lora.fused = Switch.on
    model = (with_rope if rope else lambda model, pipeline: built(pipeline, model))(
        random_model(family, **more), pipeline
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.05, generator=torch.Generator().manual_seed(1))
    return model


def ran(run):
    """The result of `run`, and how often the profiler saw each RoPE operator."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        result = run()
    return result, Counter(event.name for event in seen.events() if event.name.startswith("fxtune::rotary"))


def trained(model):
    def run():
        loss = model(**packed(model)).logits.logsumexp(-1).mean()
        return [
            loss,
            *torch.autograd.grad(loss, [parameter for parameter in model.parameters() if parameter.requires_grad]),
        ]

    return ran(run)


@pytest.mark.parametrize(
    ("family", "at_once", "policy"),
    slow_but(
        [
            (family, at_once, policy)
            for family, at_once in (("llama", True), ("mistral", True), ("gemma2", True), ("qwen3", False))
            for policy in (None, Policy.full, Policy.selective)
        ],
        ("llama", True, Policy.selective),
        ("gemma2", True, Policy.full),
        ("qwen3", False, None),
    ),
)
def test_fused_adapters_return_rotated_projections(family, at_once, policy):
    """In a family that norms q and k after their projections, they are rotated after the norms."""
    pipeline = lora()
    if policy:
        pipeline.checkpointing.enabled, pipeline.checkpointing.policy = True, policy
    (plain, none), (mine, seen) = trained(adapted(lora(), family, rope=False)), trained(adapted(pipeline, family))
    forwards = {None: 2, Policy.full: 4, Policy.selective: 8}[
        policy
    ]  # a selective checkpoint dispatches each operator twice
    assert not none
    assert seen == (
        {"fxtune::rotary_qkv": forwards, "fxtune::rotary_qkv_backward": 2}
        if at_once
        else {"fxtune::rotary": forwards + 2}
    )
    for result, expected in zip(mine, plain, strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-6)


def seen_by(monkeypatch, name):
    """(columns, numbers between rows) of the gradients that a method of the frozen weights is given."""
    own, found = getattr(Dense, name), []

    def method(self, x, factor):
        found.extend([(x.shape[1], x.stride(0) - x.shape[1])] if factor is self.b else [])
        return own(self, x, factor)

    monkeypatch.setattr(Dense, name, method)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("family", "compiled"), [("llama", False), ("qwen2", False), ("qwen2", True)])
def test_dy_b_is_written_into_the_padding_of_dy_without_a_copy(family, compiled, monkeypatch):
    """The gradient of q, k and v is already in the buffer that the matmul reads. The first layer has no such matmul,
    since its input needs no gradient.
    """
    plain = trained(adapted(lora(r=16), family, rope=False))[0]
    padded, copied = seen_by(monkeypatch, "padded"), seen_by(monkeypatch, "operand")
    model = adapted(lora(r=16), family)
    if compiled:
        for layer in decoder_layers(model):
            layer.compile(fullgraph=True)
    mine = trained(model)[0]
    sizes = [getattr(decoder_layers(model)[0].self_attn, name).out_features for name in ("q_proj", "k_proj", "v_proj")]
    room = 64 if family == "qwen2" else 48  # three ranks of 16, and a column for the biases
    assert padded == [(sum(sizes), room)]
    assert not [call for call in copied if call[1]]
    for result, expected in zip(mine, plain, strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-6)


def test_gradient_without_padding_is_copied():
    """A hook may replace the gradient by a tensor without padding after its rows, or after the last row."""
    weights, a, b = [torch.randn(24, 16)], [torch.randn(4, 16)], [torch.randn(24, 4, requires_grad=True)]
    made, x, above = [augment(weights, [4])], torch.randn(5, 16, requires_grad=True), torch.randn(5, 24)
    found = []
    for dy in (
        above,
        torch.randn(5 * 40)[: 4 * 40 + 24].as_strided((5, 24), (40, 1)).copy_(above),
        F.pad(above, (0, 16))[:, :24],
    ):
        kept = dy.clone()
        y = torch.ops.fxtune.lora_linear(x, a, b, [], made, [1.0], "dense", True, None)[0]
        found.append(torch.autograd.grad(y, [x, *b], dy))
        assert torch.equal(dy, kept)
    for tensor in found[1:]:
        torch.testing.assert_close(tensor, found[0], rtol=1e-5, atol=1e-5)


def test_queries_are_rotated_once_with_adapters_switched_off():
    model, plain = adapted(lora(), "llama"), built(Pipeline(), random_model("llama"))
    with model.disable_adapter():
        logits, seen = ran(lambda: model(**packed(model)).logits)
    assert seen == {"fxtune::rotary": 2}
    torch.testing.assert_close(logits, plain(**packed(plain)).logits, rtol=1e-5, atol=1e-5)


def test_generation_with_a_cache():
    ids, found = torch.arange(9)[None], []
    for rope in (False, True):
        model = adapted(lora(), "llama", rope=rope)
        found.append(
            model.generate(input_ids=ids, max_new_tokens=6, do_sample=False, attention_mask=torch.ones_like(ids))
        )
    assert torch.equal(*found)
