"""Which modules get adapters: all linears of the decoder but routers, or those that the options name, and no silent loss."""

from __future__ import annotations

import itertools
import json
import re
import warnings

import pytest
import torch
from safetensors.torch import load_file
from support import image_models
from support.architectures import (
    CPU,
    SIZES,
    built,
    facts_of,
    logits,
    lora,
    on_disk,
    prepared_model,
    tiny_model,
    trained,
)
from support.cases import slow_but
from support.lora_models import loss_and_gradients, prepared_pair, require_close
from torch import nn

from fxtune.errors import ConfigError
from fxtune.export.save import save_model
from fxtune.facts.options import AdapterInit, Switch
from fxtune.models.kinds.image_decoder.parts import image_modules
from fxtune.models.kinds.known import images_of
from fxtune.models.load import Init, ModelConfig, load_config, load_tokenizer
from fxtune.models.structure import backbone, skeleton
from fxtune.objectives.language_model import LanguageModel
from fxtune.outputs.merge import merge
from fxtune.techniques.assemble import assemble
from fxtune.techniques.lora import targets
from fxtune.techniques.pipeline import make_probe

MIXTURES = ("deepseek_v3", "gpt_oss", "llama4_text", "mixtral", "qwen3_moe", "qwen3_next")
EXPERTS = {"deepseek_v3": 2, "gpt_oss": 4, "mixtral": 4, "qwen3_moe": 4, "qwen3_next": 8}
"""Tensors of experts with an adapter, two in each layer with experts."""

LAGUNA = {
    "model_type": "laguna",
    **SIZES,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}


def adapted(model) -> list[str]:
    """The modules with adapters, by their names in the base."""
    from peft.tuners.lora import LoraLayer

    found = [name for name, module in model.named_modules() if isinstance(module, LoraLayer)]
    return [name.removeprefix("base_model.model.") for name in found]


def refused(family: str = "llama", **options) -> str:
    return "\n".join(lora(**options).lora.check(facts_of(tiny_model(family), packing=False)))


@pytest.mark.parametrize("kind", [*MIXTURES, "gemma3", "cohere2", "gpt_neox"])
def test_all_linear_means_every_linear_of_the_decoder_but_routers_and_gates(kind):
    pipeline = lora()
    base = skeleton(load_config(tiny_model(kind)).to_dict())
    decoder = {id(module) for module in backbone(base).modules()}
    wanted = {
        name
        for name, module in base.named_modules()
        if isinstance(module, nn.Linear)
        and id(module) in decoder
        and not name.endswith((".router", ".mlp.gate", ".in_proj_ba"))
    }
    model = built(pipeline, tiny_model(kind), packing=False)
    found = adapted(model)
    experts = [name for name in found if ".experts" in name]
    assert {*found} - {*experts} == wanted
    assert len(experts) == EXPERTS.get(kind, 0)
    assert not [name for name in found if "vision_tower" in name]


@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        ("deepseek_v3", ["2 gate_proj, 2 up_proj, 3 down_proj, 1 gate_up_proj", "(routers): 1 gate", "(the head): 1 lm_head"]),
        ("llama4_text", ["(routers): 1 router", "(experts in a tensor that peft does not know): 1 gate_up_proj, 1 down_proj"]),
        ("qwen3_next", ["in_proj_qkvz", "out_proj", "(gates of the delta rule): 3 in_proj_ba"]),
        ("gemma3", ["(techniques.lora.vision=off): 2 k_proj, 2 v_proj, 2 q_proj, 3 out_proj, 3 fc1, 3 fc2"]),
        ("gemma3n_text", ["2 prediction_coefs", "(training reads their weight past the module): 2 correction_coefs"]),
        ("mamba", ["2 in_proj, 2 x_proj;", "(peft adapts no out_proj of Mamba): 2", "(their module is never called): 2 dt_proj"]),
    ],
)  # fmt: skip
def test_the_evidence_counts_adapters_and_what_was_left_out_by_kind(kind, texts):
    pipeline = lora()
    prepared = assemble(pipeline, tiny_model(kind), load_config(tiny_model(kind)), CPU, 0)
    model = prepared.module
    first = next(iter(pipeline.lora.verify(prepared, make_probe(model, packing=False))))
    assert first.acted
    for text in texts:
        assert text in first.observed


def test_a_target_that_lost_its_adapter_is_an_error():
    pipeline = lora()
    prepared = prepared_model(pipeline, tiny_model("llama"))
    model = prepared.module
    layer = backbone(model).layers[0].mlp
    layer.up_proj = layer.up_proj.base_layer
    with pytest.raises(ConfigError, match="13 modules"):
        pipeline.prove(prepared, make_probe(model))


@pytest.mark.parametrize(
    ("kind", "fused"),
    slow_but(
        itertools.product(("deepseek_v3", "qwen3_next"), ("off", "on")), ("deepseek_v3", "on"), ("qwen3_next", "off")
    ),
)
def test_the_adapter_of_a_mixture_is_loaded_by_plain_peft_merged_and_trained_on(kind, fused, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = on_disk(tmp_path / "base", model=tiny_model(kind))
    pipeline, config = lora(fused=Switch(fused)), ModelConfig(path=str(base))
    prepared = prepared_model(pipeline, config, packing=False)
    mine = prepared.module
    start = logits(mine)
    expected = logits(trained(mine))
    assert (expected - start).abs().max() > 0.01
    folder = save_model(prepared, load_tokenizer(config), tmp_path / "adapter")
    assert any(".shared_expert" in name for name in load_file(folder / "adapter_model.safetensors"))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # of patterns that match no module, as peft sees it
        theirs = logits(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder))
    torch.testing.assert_close(theirs, expected, atol=2e-4, rtol=1e-4)
    merged = AutoModelForCausalLM.from_pretrained(merge(folder, tmp_path / "merged"))
    torch.testing.assert_close(logits(merged), expected, atol=2e-4, rtol=1e-4)
    config.adapter = str(folder)
    torch.testing.assert_close(logits(built(pipeline, config, packing=False)), expected, atol=2e-4, rtol=1e-4)
    options = json.loads((folder / "adapter_config.json").read_text())
    patterns = {"rank_pattern": 8, "alpha_pattern": 64.0} if options["rank_pattern"] else {}
    options |= {name: {r".*\.gate_up_proj": value} for name, value in patterns.items()}  # as peft itself saves them
    (folder / "adapter_config.json").write_text(json.dumps(options))
    (folder / "proof.json").unlink()
    torch.testing.assert_close(logits(built(pipeline, config, packing=False)), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["deepseek_v3", "llama4_text"])
def test_dense_linears_of_a_mixture_run_fused(kind):
    pair = prepared_pair(tiny_model(kind))
    plain, fused = (prepared.module for prepared in pair)
    assert pair[1].fusion.operators["mlp"] == 2
    require_close(loss_and_gradients(fused), loss_and_gradients(plain), 1e-4)


OPTIONS = {
    "names": {"target_modules": ["q_proj", "self_attn.o_proj"]},
    "expression": {"target_modules": [r".*\.1\.(self_attn\.[qk]_proj|mlp\.up_proj)"]},
    "excluded name": {"exclude_modules": ["o_proj"]},
    "excluded expression": {"exclude_modules": [r".*\.0\.mlp\..*"]},
    "layers": {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1]},
    "ranks": {"rank_pattern": {"q_proj": 3, r"layers\.1\.mlp\..*": 7}},
    "alphas": {"target_modules": ["k_proj"], "alpha_pattern": {"layers.0.self_attn.k_proj": 3.0}},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_targets_and_patterns_mean_what_they_mean_in_peft(options):
    import peft
    from transformers import AutoModelForCausalLM

    theirs = {"r": 4, "lora_alpha": 32.0, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **options}
    for option in ("target_modules", "exclude_modules"):  # peft's regular expressions are strings, its names are lists
        if isinstance(theirs.get(option), list) and "*" in theirs[option][0]:
            theirs[option] = theirs[option][0]
    base = AutoModelForCausalLM.from_config(load_config(tiny_model("llama")))
    reference = peft.get_peft_model(base, peft.LoraConfig(**theirs))
    mine = built(lora(**options), tiny_model("llama"))
    assert adapted(mine) == adapted(reference)
    for name in adapted(mine):
        one, other = (model.get_submodule(f"base_model.model.{name}") for model in (mine, reference))
        assert (one.r, one.scaling) == (other.r, other.scaling), name


def test_an_adapter_of_peft_with_other_words_for_the_same_modules_is_trained_on(tmp_path):
    import peft
    from transformers import AutoModelForCausalLM

    base = on_disk(tmp_path / "base")
    plain = AutoModelForCausalLM.from_pretrained(base)
    options = {"target_modules": ["q_proj", "o_proj"], "layers_to_transform": [1], "rank_pattern": {"o_proj": 2}}
    made = peft.get_peft_model(plain, peft.LoraConfig(r=4, lora_alpha=32, **options))
    made.save_pretrained(tmp_path / "adapter")
    config = ModelConfig(path=str(base), adapter=str(tmp_path / "adapter"))
    built(lora(**options), config)
    with pytest.raises(ConfigError, match=r"rank_pattern: \{\} in the recipe, \{'o_proj': 2\} in the adapter"):
        built(lora(**{**options, "rank_pattern": {}}), config)
    with pytest.raises(ConfigError, match=r"layers_to_transform: \[\] in the recipe, \[1\] in the adapter"):
        built(lora(**{**options, "layers_to_transform": []}), config)


def test_an_excluded_module_excludes_what_is_inside():
    assert not [name for name in adapted(built(lora(exclude_modules=["mlp"]), tiny_model("llama"))) if "mlp" in name]
    model = built(lora(exclude_modules=["experts"]), tiny_model("qwen3_moe"), packing=False)
    assert not [name for name in adapted(model) if "experts" in name]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"target_modules": ["q_prj"]}, "target_modules: q_prj is no module of this model. Did you mean q_proj? Its linears are"),
        ({"target_modules": [".*quer.*"]}, "target_modules: .*quer.* is no module"),
        ({"target_modules": ["(q_proj"]}, "target_modules: (q_proj is no regular expression"),
        ({"exclude_modules": ["up_prj"]}, "exclude_modules: up_prj is no module of this model. Did you mean up_proj?"),
        ({"layers_to_transform": [0, 2]}, "layers_to_transform: 2 is no layer of this model. It has layers 0 to 1."),
        ({"rank_pattern": {"q_prj": 8}}, "rank_pattern: q_prj matches no module with an adapter. Did you mean q_proj?"),
        ({"target_modules": ["q_proj"], "alpha_pattern": {"k_proj": 8.0}}, "alpha_pattern: k_proj matches no module"),
        ({"target_modules": ["q_proj"], "exclude_modules": ["self_attn"]}, "target_modules: nothing is adapted"),
        ({"family": "mixtral", "target_modules": ["w1", "q_proj"]}, "without also targeting w3"),
        ({"family": "mixtral", "dropout": 0.1}, "dropout: 0.1, which peft does not offer for experts in one tensor"),
        ({"family": "mixtral", "init": AdapterInit.pissa}, "init: pissa, which peft does not offer"),
        ({"family": "llama4_text", "target_modules": ["router"]}, "router is a Llama4Router, which is no plain linear"),
    ],
)  # fmt: skip
def test_what_matches_no_module_is_refused_before_weights_load(options, reason):
    assert reason in refused(**options)


def test_named_modules_of_the_parts_for_images_are_left_out_unless_an_option_adapts_them():
    names = {"target_modules": ["q_proj", "v_proj"]}
    assert refused("gemma3", **names) == ""
    nothing = refused("gemma3", target_modules=[".*vision_tower.*q_proj"])
    assert "target_modules: nothing is adapted" in nothing
    assert "left out (techniques.lora.vision=off): 2 q_proj" in nothing
    assert "modules_to_save: 1 modules in multi_modal_projector" in refused(
        "gemma3", modules_to_save=["multi_modal_projector"]
    )
    assert "vision: on, and llama reads no images. Set it to off." in refused("llama", vision=True)
    found = adapted(built(lora(**names), tiny_model("gemma3"), packing=False))
    assert not [name for name in found if "vision_tower" in name]


def test_names_of_experts_adapt_their_tensors():
    model = built(lora(target_modules=["q_proj", "w1", "w3", "w2"]), tiny_model("mixtral"), packing=False)
    assert len([name for name in adapted(model) if "experts" in name]) == 4


@pytest.mark.parametrize("precision", ["highest", "medium"])
def test_a_linear_is_known_by_its_numbers(precision):
    """Falcon's class computes the same product as nn.Linear by other code; DeepSeek V4's computes one by groups."""
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4GroupedLinear
    from transformers.models.falcon.modeling_falcon import FalconLinear

    before = torch.get_float32_matmul_precision()
    targets._is_plain.cache_clear()
    torch.set_float32_matmul_precision(precision)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            assert targets._is_plain(FalconLinear)
            assert not targets._is_plain(DeepseekV4GroupedLinear)
    finally:
        torch.set_float32_matmul_precision(before)
        targets._is_plain.cache_clear()


def test_adapters_that_peft_loses_on_loading_are_refused_and_the_advised_key_trains_and_loads(tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    pytest.importorskip("transformers.models.laguna")
    laguna = ModelConfig(path=None, init=Init.random, architecture=LAGUNA)
    with pytest.raises(ConfigError, match="shared_experts") as refusal:
        built(lora(), laguna, packing=False)
    advised = re.search(r"techniques\.lora\.exclude_modules=\[(.*?)\]", str(refusal.value))
    assert advised is not None
    base = on_disk(tmp_path / "base", model=laguna)
    config = ModelConfig(path=str(base))
    prepared = prepared_model(lora(exclude_modules=advised[1].split(",")), config, packing=False)
    mine = prepared.module
    expected = logits(trained(mine))
    folder = save_model(prepared, load_tokenizer(config), tmp_path / "adapter")
    theirs = logits(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder))
    torch.testing.assert_close(theirs, expected, atol=2e-4, rtol=1e-4)


SHOWN = [[4, (1, 2), 5], [6], [3, (2, 2), 3, (1, 3), 6]]


@pytest.mark.parametrize("family", slow_but(image_models.CONFIGS, "qwen2_5_vl", "gemma3", "llava", "idefics3"))
def test_adapters_of_the_parts_for_images_learn(family):
    recipe = image_models.recipe(family)
    pipeline, _ = lora(vision=True, projector=True).resolved(facts_of(recipe))
    prepared = assemble(pipeline, recipe, load_config(recipe), CPU, 0)
    model, base = prepared.module, prepared.module.get_base_model()
    beside = {*image_modules(model)}
    of_images = [name for name in adapted(model) if base.get_submodule(name) in beside]
    assert of_images
    pipeline.prove(prepared, make_probe(model))
    image_models.draw(model)
    batch = image_models.batch(
        base, [[image_models.document(family, base, parts, seed) for seed, parts in enumerate(SHOWN)]]
    )
    LanguageModel(prepared).summed_loss(batch).backward()
    learning = {name: weight.grad for name, weight in model.named_parameters() if "lora_B" in name}
    idle = [name for name, gradient in learning.items() if gradient is None or not gradient.any()]
    assert [name for name in idle if ".experts." not in name] == []


def test_without_the_options_the_parts_for_images_run_without_gradient():
    pipeline = lora()
    prepared = prepared_model(pipeline, image_models.recipe("qwen2_5_vl"), packing=True)
    model = prepared.module
    assert all(name.startswith("model.language_model.") for name in adapted(model))
    assert not any(feature.requires_grad for feature in images_of(model.config).features(model))
    assert prepared.targets.left["techniques.lora.projector=off"] == [
        "model.visual.merger.mlp.0",
        "model.visual.merger.mlp.2",
    ]
    assert len(prepared.targets.left["techniques.lora.vision=off"]) == 10


@pytest.mark.parametrize(("family", "fused"), [("qwen2_5_vl", "on"), ("qwen2_5_vl", "off"), ("qwen3_5", "on")])
def test_an_adapter_with_parts_for_images_loads_in_plain_peft(family, fused, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForImageTextToText

    made = image_models.model(family, vocabulary=1024)
    made.save_pretrained(tmp_path / "base")
    load_tokenizer(ModelConfig()).save_pretrained(tmp_path / "base")
    config = ModelConfig(path=str(tmp_path / "base"))
    pipeline = lora(vision=True, projector=True, fused=Switch(fused))
    prepared = assemble(pipeline, config, load_config(config), CPU, 0)
    mine = trained(prepared.module)
    row, images = images_of(mine.config).row(mine)
    types = image_models.type_ids(mine, row)
    before, expected = (model(input_ids=row, **images, **types).logits for model in (made, mine))
    assert (expected - before).abs().max() > 0.01
    folder = save_model(prepared, load_tokenizer(config), tmp_path / "adapter")
    names = set(load_file(folder / "adapter_model.safetensors"))
    assert any(name.startswith("base_model.model.model.language_model.layers.0.") for name in names)
    assert any(name.startswith("base_model.model.model.visual.blocks.0.") for name in names)
    base = AutoModelForImageTextToText.from_pretrained(tmp_path / "base")
    theirs = PeftModel.from_pretrained(base, folder)(input_ids=row, **images, **types).logits
    torch.testing.assert_close(theirs, expected, atol=1e-5, rtol=1e-4)
    (tmp_path / "base" / "preprocessor_config.json").write_text("{}")
    whole = merge(folder, tmp_path / "whole")
    assert (whole / "preprocessor_config.json").exists()
    merged = AutoModelForImageTextToText.from_pretrained(whole)(input_ids=row, **images, **types).logits
    torch.testing.assert_close(merged, expected, atol=1e-4, rtol=1e-4)
