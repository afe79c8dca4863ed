"""Adapters: trained alone, in float32, from the base's function; saved and loaded by plain peft; asked for by right names."""

from __future__ import annotations

import itertools

import pytest
import torch
from support.architectures import (
    ADAPTERS,
    FAMILIES,
    built,
    facts_of,
    logits,
    lora,
    prepared_model,
    random_model,
    trained,
)
from support.cases import slow_but

from fxtune.errors import ConfigError
from fxtune.export.save import save_model
from fxtune.facts.options import AdapterInit
from fxtune.models.load import DType, ModelConfig, load_tokenizer
from fxtune.techniques.pipeline import make_probe


def refused(family: str = "llama", **options) -> str:
    pipeline = lora(**options)
    return "\n".join(pipeline.lora.check(facts_of(random_model(family))))


@pytest.mark.parametrize("family", slow_but(FAMILIES, "llama", "gemma3", "phi"))
def test_only_adapters_get_gradients_in_every_family(family):
    model = built(lora(), random_model(family))
    model(**make_probe(model)).logits.sum().backward()
    with_gradient = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert with_gradient
    assert all("lora_" in name for name in with_gradient)
    assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} == with_gradient
    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    adapted = [name for name, _ in model.named_parameters() if "lora_A" in name]
    assert len(adapted) == (len(linears) - 1) / 3, "each linear but the head became itself, A and B"


@pytest.mark.parametrize(
    ("kind", "dtype"),
    slow_but(
        itertools.product(ADAPTERS, (DType.float32, DType.bfloat16)),
        *((kind, DType.float32) for kind in ("rslora", "dora", "pissa", "embedding")),
        ("head", DType.bfloat16),
    ),
)
def test_it_starts_as_its_base_and_plain_peft_loads_the_trained_adapter(kind, dtype, base, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    pipeline, model = lora(**ADAPTERS[kind]), ModelConfig(path=str(base), dtype=dtype)
    prepared = prepared_model(pipeline, model, dtype=dtype.value)
    mine = prepared.module
    pipeline.prove(prepared, make_probe(mine))
    assert {parameter.dtype for parameter in mine.parameters() if parameter.requires_grad} == {torch.float32}
    start = logits(mine)
    expected = logits(trained(mine))
    assert (expected - start).abs().max() > 0.01
    adapter = save_model(prepared, load_tokenizer(model), tmp_path / "adapter")
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=getattr(torch, dtype.value))
    theirs = logits(PeftModel.from_pretrained(plain, adapter))
    # peft rounds modules_to_save to the base's bfloat16; everything else is bit for bit the same
    assert torch.equal(theirs, expected) or (
        dtype is DType.bfloat16 and "modules_to_save" in ADAPTERS[kind] and (theirs - expected).abs().max() < 0.02
    )


def test_the_adapter_is_drawn_from_the_seed():
    first, again, other = (
        dict(built(lora(), random_model("llama"), seed=seed).named_parameters()) for seed in (0, 0, 1)
    )
    name = next(name for name in first if "lora_A" in name)
    assert torch.equal(first[name], again[name])
    assert not torch.equal(first[name], other[name])


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"target_modules": ["q_prj"]},
            "target_modules: q_prj is no module of this model. Did you mean q_proj? Its linears are down_proj, gate_proj",
        ),
        ({"modules_to_save": ["head"]}, "modules_to_save: head is no module"),
        (
            {"target_modules": ["self_attn"]},
            "self_attn is a LlamaAttention, which is no linear. Name linears: down_proj",
        ),
        (
            {"target_modules": ["q_proj", "input_layernorm"]},
            "input_layernorm is a LlamaRMSNorm, which is no linear. Name linears: down_proj",
        ),
        ({"target_modules": []}, "target_modules: empty"),
        ({"target_modules": ["all-linear", "q_proj"]}, "Use it alone"),
        ({"dora": True, "init": AdapterInit.pissa}, "init: pissa"),
        ({"family": "gemma", "modules_to_save": ["lm_head"]}, "one tensor"),
    ],
)
def test_invalid_options_are_refused_before_weights_load(options, reason):
    assert reason in refused(**options)
    assert refused() == ""
    assert refused(target_modules=["q_proj", "v_proj"]) == ""


def test_frozen_adapters_and_trained_base_weights_are_an_error():
    pipeline = lora()
    prepared = prepared_model(pipeline, random_model("llama"))
    model = prepared.module
    model.get_base_model().lm_head.weight.requires_grad_(True)
    with pytest.raises(ConfigError, match="1 of them in the base"):
        pipeline.prove(prepared, make_probe(model))
    model.requires_grad_(False)
    with pytest.raises(ConfigError, match=r"0 of .* parameters trained"):
        pipeline.prove(prepared, make_probe(model))


def test_adapters_that_change_the_base_at_the_start_are_an_error():
    pipeline = lora()
    prepared = prepared_model(pipeline, random_model("llama"))
    model = trained(prepared.module)
    with pytest.raises(ConfigError, match="the model starts as its base; seen: 0 of 14 matrices B are zero"):
        pipeline.prove(prepared, make_probe(model))
