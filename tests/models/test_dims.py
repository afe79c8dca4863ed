"""Sizes that are read off a model without weights: those of plain transformers, and as published."""

from __future__ import annotations

import pytest
import torch
from support.architectures import CPU, lora
from support.decoder_sizes import decoder_sizes
from support.model_table import small_models
from support.published import PUBLISHED
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from fxtune.distributed.parallel import Degrees
from fxtune.estimate.memory import forecast
from fxtune.estimate.traffic import step_traffic
from fxtune.estimate.weights import trained_parameters
from fxtune.facts.recomputation import RecomputePlan
from fxtune.facts.run import Facts
from fxtune.models.dims import Shape
from fxtune.models.load import Init, ModelConfig, load_config
from fxtune.techniques.assemble import assemble
from fxtune.techniques.attention.backends.flash4 import FLASH4
from fxtune.techniques.pipeline import Pipeline

OTHERS = [
    *("mistral", "ministral", "ministral3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next"),
    *("qwen3_5_text", "qwen3_5_moe_text", "gemma2", "gemma3_text", "gemma4_unified_text", "phi3", "phimoe"),
    *("olmo2", "olmo3", "olmoe", "granite", "granitemoe", "granitemoehybrid", "cohere", "cohere2"),
    *("cohere2_moe", "deepseek_v2", "glm4", "glm4_moe", "glm4_moe_lite", "ernie4_5", "ernie4_5_moe", "exaone4"),
    *("exaone_moe", "gpt_oss", "mixtral", "minimax_m2", "nemotron", "smollm3", "starcoder2", "falcon_h1"),
    *("lfm2", "lfm2_moe", "hunyuan_v1_dense", "seed_oss", "apertus", "dots1", "kimi_linear", "jamba", "bamba"),
    *("phi4_multimodal", "afmoe", "laguna", "lfm3", "olmo_hybrid", "solar_open", "hy_v3", "arcee"),
    *("minimax_m3_vl_text", "deepseek_v4"),
]
"""Types whose default config is shrunk."""
TYPES = [
    *(name for name, values in PUBLISHED.items() if values["model_type"] in CONFIG_MAPPING),
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in OTHERS if kind in CONFIG_MAPPING),
]
BLOCKS = {"M": "mamba", "E": "moe", "*": "attention"}
FIVE = [*["sliding_attention"] * 4, "full_attention"]
REAL = {
    "Nemotron 3 Nano 30B-A3B": (
        31.6,
        dict(
            model_type="nemotron_h",
            vocab_size=131072,
            hidden_size=2688,
            layers_block_type=[BLOCKS[kind] for kind in "MEMEM*" + "EMEMEM*" * 4 + "EMEMEMEM*" + "EMEMEMEME"],
            **decoder_sizes(heads=32, key_heads=2, head_dim=128),
            mamba_num_heads=64,
            mamba_head_dim=64,
            ssm_state_size=128,
            n_groups=8,
            n_routed_experts=128,
            num_experts_per_tok=6,
            moe_intermediate_size=1856,
            moe_shared_expert_intermediate_size=3712,
        ),
    ),
    "Gemma 4 E2B": (
        4.63,
        dict(
            model_type="gemma4_text",
            **decoder_sizes(1536, layers=35, intermediate=6144, heads=8, key_heads=1),
            hidden_size_per_layer_input=256,
            num_kv_shared_layers=20,
            use_double_wide_mlp=True,
            layer_types=FIVE * 7,
        ),
    ),
    "Gemma 3n E2B": (
        4.44,
        dict(
            model_type="gemma3n_text",
            num_hidden_layers=30,
            intermediate_size=[8192] * 30,
            num_kv_shared_layers=10,
            activation_sparsity_pattern=[0.95] * 10 + [0.0] * 20,
            layer_types=FIVE * 6,
        ),
    ),
    "Llama 4 Maverick": (401, dict(model_type="llama4_text", num_local_experts=128, interleave_moe_layer_step=2)),
    "Jamba": (51.6, dict(model_type="jamba")),
    "DeepSeek V3": (671, dict(model_type="deepseek_v3")),
    "StarCoder2 3B": (3.03, dict(model_type="starcoder2")),
}


def config_of(values):
    return AutoConfig.for_model(**values)


def small(name):
    return PUBLISHED[name] if name in PUBLISHED else small_models.small(name)


def facts_of(name, pipeline=None):
    return Facts.of(
        CPU.facts(),
        model=config_of(small(name)).to_dict(),
        packing=True,
        sequence_length=64,
        rows=(64,),
        techniques=pipeline or Pipeline(),
    )


@pytest.mark.parametrize("name", TYPES)
def test_parameters_are_those_of_plain_transformers(name):
    config = config_of(small(name))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    total = sum(weight.numel() for weight in model.parameters())
    facts = facts_of(name)
    shape = Shape.of(facts.model)
    assert shape.linear_parameters + shape.other_parameters == trained_parameters(facts) == total
    need = forecast(facts, RecomputePlan())
    assert need.weights == 4 * total
    assert need.kept > 0
    assert step_traffic(Facts.of(facts, degrees=Degrees(replicate=2))).gradients > 0


@pytest.mark.parametrize("name", TYPES)
def test_adapters_are_those_of_the_built_model(name):
    if name in ("laguna", "inkling2_text"):
        pytest.skip("peft cannot load adapters of all their linears again, so they are refused")
    model = ModelConfig(path=None, init=Init.random, architecture=small(name))
    pipeline = lora(r=4, target_modules=["all-linear"])
    built = assemble(pipeline, model, load_config(model), CPU, 0).module
    made = sum(weight.numel() for weight in built.parameters() if weight.requires_grad)
    planned = trained_parameters(facts_of(name, pipeline))
    # Only the built model shows that some modules of these types are never called with text.
    assert planned > made if name in ("jamba", "phi4_multimodal") else planned == made


@pytest.mark.parametrize("name", REAL)
def test_published_sizes(name):
    billions, values = REAL[name]
    shape = Shape.of(config_of(values).to_dict())
    assert (shape.linear_parameters + shape.other_parameters) / 1e9 == pytest.approx(billions, rel=2e-3)


@pytest.mark.parametrize(
    ("values", "widths"),
    [
        (dict(model_type="gemma4_text"), {256, 512}),
        (dict(model_type="mimo_v2_flash"), {192, 128}),
        (dict(model_type="deepseek_v3"), {192, 128}),
        (PUBLISHED["inkling2_text"], {24, 16}),
    ],
)
def test_every_width_of_a_head_is_seen(values, widths):
    if values["model_type"] not in CONFIG_MAPPING:
        pytest.skip("this transformers is older than the type")
    assert Shape.of(config_of(values).to_dict()).head_widths == widths


def test_flash4_is_refused_for_the_wide_heads_of_gemma_4():
    h100 = dict(device="cuda", device_name="NVIDIA H100", capability=(9, 0), dtype="bfloat16", sequence_length=64)
    wide, narrow = (config_of({"model_type": kind}).to_dict() for kind in ("gemma4_text", "gemma3_text"))
    assert any("512" in reason for reason, _ in FLASH4.refused_heads(Facts(**h100, model=wide)))
    assert not list(FLASH4.refused_heads(Facts(**h100, model=narrow)))


def test_layers_that_differ_are_counted_apart():
    shape = Shape.of(config_of(PUBLISHED["nemotron_h"]).to_dict())
    mamba, moe, attention, mlp = shape.kinds
    assert shape.order == (0, 1, 2, 3, 0)
    assert (moe.experts, moe.used, moe.expert_inner) == (6, 2, 40)
    assert not mamba.attentions
    assert not mlp.attentions
    assert (attention.attentions[0].heads, attention.inner, mlp.q) == (4, 0, 0)
    windows = {each.window for each in Shape.of(config_of(PUBLISHED["gemma4_31b"]).to_dict()).attentions}
    assert windows == {32, 0}


@pytest.mark.parametrize(
    ("kind", "rules"),
    [
        ("qwen3_5_text", ("delta",)),
        ("kimi_linear", ("kda",)),
        ("bamba", ("scan",)),
        ("llama", ()),
        ("minimax", ("scan",)),
    ],
)
def test_the_rules_of_recurrent_layers(kind, rules):
    """fla-core is checked for these rules alone: kernels of others would be tuned for minutes."""
    assert Shape.of(config_of(PUBLISHED.get(kind, {"model_type": kind})).to_dict()).recurrences == rules


def test_an_author_s_own_type_counts_as_a_llama_of_its_sizes():
    sizes = dict(hidden_size=64, intermediate_size=256, num_attention_heads=4, num_hidden_layers=2, vocab_size=100)
    shape = Shape.of({"model_type": "mine", "auto_map": {}, **sizes})
    (layer,) = shape.kinds
    assert (shape.layers, layer.inner, layer.q, layer.k, layer.experts, shape.tied) == (2, 256, 64, 64, 1, False)
