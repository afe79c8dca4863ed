"""Hybrid models of transformers with fxtune's operators: packed documents against each document alone."""

from __future__ import annotations

import pytest
import torch
import transformers
from packaging.version import Version
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode

from fxtune.models.dims import Shape
from fxtune.models.structure import backbone, decoder_layers
from fxtune.techniques.attention import linear, recurrent
from fxtune.techniques.attention.backends.flash4 import FLASH4
from fxtune.techniques.attention.inputs import model_inputs
from scripts.make.small_models import small

FAMILIES = [
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "qwen3_next",
    "olmo_hybrid",
    "kimi_linear",
    "bailing_hybrid",
    "lfm2",
    "lfm2_moe",
    "nemotron_h",
    "granitemoehybrid",
    "falcon_h1",
    "bamba",
    "zamba2",
    "mamba2",
    "minimax",
]
LENGTHS = (5, 1, 66, 2)


def built(kind: str):
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    if kind not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    values = small(kind)
    config = CONFIG_MAPPING[kind](**{key: value for key, value in values.items() if key != "model_type"})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, weight in model.named_parameters():
        weight.data += 0.02 * torch.randn_like(weight)
        if name.endswith("A_log"):  # transformers' chunks lose digits where states decay strongly
            weight.data = -torch.rand_like(weight)
    return model.train()


@pytest.mark.parametrize("kind", FAMILIES)
def test_packed_documents_equal_each_alone(kind):
    model = built(kind)
    body = backbone(model)
    ids = torch.randint(3, 1000, (1, sum(LENGTHS)))
    expected = torch.cat([body(input_ids=one, use_cache=False)[0] for one in ids.split(LENGTHS, 1)], 1)
    seed = torch.randn_like(expected)
    weights = [weight for weight in body.parameters() if weight.requires_grad]
    gradients = torch.autograd.grad(expected, weights, seed, allow_unused=True)
    recurrent.separate(model)
    with torch.no_grad():
        observed = recurrent.observe(model, dict(input_ids=ids[:, :7], use_cache=False))
    without = kind in ("lfm2", "lfm2_moe") and Version(transformers.__version__) < Version("5.24")
    assert without or (observed is not None and observed[2]), observed
    FLASH4.prepare()
    model.set_attn_implementation(FLASH4.implementation)
    positions = torch.cat([torch.arange(length) for length in LENGTHS]).unsqueeze(0)
    inputs = model_inputs(model, ids, positions, torch.tensor([0, *LENGTHS]).cumsum(0).int())
    with FlopCounterMode(display=False) as counter:
        found = body(**inputs)[0]
    counted = counter.get_flop_counts()["Global"].get(torch.ops.fxtune.linear_attention, 0)
    layers = Shape.of(model.config.to_dict()).counts
    recurrences = [(each, count) for layer, count in layers for each in layer.recurrences]
    assert counted == sum(LENGTHS) * sum(each.flops[0] * count for each, count in recurrences)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    for mine, other in zip(torch.autograd.grad(found, weights, seed, allow_unused=True), gradients, strict=True):
        assert (mine is None) == (other is None)
        if mine is not None and other is not None:
            assert (mine - other).abs().max() <= 1e-4 * other.abs().max() + 1e-6


@pytest.mark.parametrize("kind", ["qwen3_5_text", "kimi_linear", "nemotron_h"])
def test_compiled_layers_are_one_graph_whatever_the_documents(kind):
    if kind != "qwen3_5_text" and Version(torch.__version__) < Version("2.12"):
        pytest.skip("this torch cannot trace the experts that transformers has for a CPU")
    model, compiled = built(kind), built(kind)
    graphs = CompileCounterWithBackend("aot_eager")
    for each in (model, compiled):
        recurrent.separate(each)
    for layer in decoder_layers(compiled):
        layer.forward = torch.compile(layer.forward, backend=graphs, fullgraph=True, dynamic=False)
    made = []
    for lengths in ((5, 1, 66, 2), (37, 37, 0, 0), (1, 1, 1, 71)):
        total = sum(lengths)
        ids = torch.randint(3, 1000, (1, total))
        positions = torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)
        bounds = torch.tensor([0, *lengths]).cumsum(0).int()
        results = []
        for each in (model, compiled):
            each.zero_grad()
            out = backbone(each)(**model_inputs(each, ids, positions, bounds))[0]
            out.square().sum().backward()
            results.append([out, *(weight.grad for weight in each.parameters() if weight.grad is not None)])
        for mine, other in zip(*results, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5 * float(other.detach().abs().max()))
        made.append(graphs.frame_count)
    assert made[0] == made[-1], made


def test_lightning_layers_have_one_graph():
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    values = {**small("minimax"), "num_hidden_layers": 3, "layer_types": ["linear_attention"] * 3}
    values.pop("model_type", None)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["minimax"](**values), dtype=torch.float32)
    recurrent.separate(model)
    graphs = CompileCounterWithBackend("eager")
    for layer in decoder_layers(model):
        layer.forward = torch.compile(layer.forward, backend=graphs, dynamic=False)
    backbone(model)(input_ids=torch.randint(3, 100, (1, 20)), use_cache=False)
    assert graphs.frame_count == 1


@torch.no_grad()
def test_documents_stay_in_their_pass_and_apart_whatever_a_config_says_of_caches():
    model = built("qwen3_5_text").eval()
    recurrent.separate(model)
    ids = torch.randint(3, 1000, (1, 24))
    packed = torch.cat([torch.arange(length) for length in (7, 8, 9)])[None]
    alone = backbone(model)(input_ids=ids, use_cache=False)[0]
    apart = model(input_ids=ids, position_ids=packed, use_cache=False).logits
    assert torch.equal(backbone(model)(input_ids=ids, use_cache=False)[0], alone)
    assert model.config.use_cache
    assert torch.equal(model(input_ids=ids, position_ids=packed).logits, apart)


class Convolution(torch.nn.Module):
    def forward(self, x, **kwargs):
        return causal_conv1d_fn(x, **kwargs)  # noqa: F821


class WithoutDocuments(torch.nn.Module):
    def forward(self, x, seq_idx=None):
        return causal_conv1d_fn(x, seq_idx=seq_idx)  # noqa: F821


def test_a_layer_that_does_not_call_its_operator_is_seen():
    model = built("qwen3_next")
    recurrent.separate(model)
    probe = dict(input_ids=torch.tensor([[5, 6, 7, 8]]), use_cache=False)
    assert recurrent.observe(model, probe)[2]
    del recurrent.mixers(model)[0].forward  # the class's own
    _, seen, acted = recurrent.observe(model, probe)
    assert not acted, seen


def test_a_part_that_does_not_get_the_documents_is_not_served():
    assert linear.serves(Convolution(), decays=False)
    assert not linear.serves(WithoutDocuments(), decays=False)
