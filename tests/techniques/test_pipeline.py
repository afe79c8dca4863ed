"""The techniques together: all reasons in one error, their order, and all of them on one model."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from support.architectures import (
    CPU,
    FAMILIES,
    built,
    enable,
    facts_of,
    logits,
    lora,
    on_disk,
    prepared_model,
    random_model,
    tiny_model,
    trained,
)
from support.cases import slow_but

from fxtune.errors import ConfigError
from fxtune.export.save import save_model
from fxtune.facts.options import Autocast, Policy
from fxtune.models.load import DType, ModelConfig, load_config, load_tokenizer
from fxtune.techniques.assemble import assemble
from fxtune.techniques.base import Technique
from fxtune.techniques.checkpointing.technique import Checkpointing
from fxtune.techniques.compile.technique import Compile
from fxtune.techniques.liger.technique import Liger
from fxtune.techniques.lora.fuse import mlp_kernel
from fxtune.techniques.pipeline import Pipeline, make_probe
from fxtune.techniques.precision import Precision
from fxtune.techniques.rope import Rope


def everything() -> Pipeline:
    pipeline = lora()
    pipeline.rope = Rope(enabled=True, factor=4.0)
    pipeline.precision = Precision(enabled=True, autocast=Autocast.bfloat16)
    pipeline.checkpointing = Checkpointing(enabled=True)
    return pipeline


def test_every_field_is_a_technique_and_four_are_on_by_default():
    defaults = {entry.name: getattr(Pipeline(), entry.name) for entry in dataclasses.fields(Pipeline)}
    assert all(isinstance(technique, Technique) for technique in defaults.values())
    assert [name for name, _ in Pipeline().enabled()] == ["attention", "precision", "router", "plugins"]


@pytest.mark.parametrize("family", slow_but([family for family in FAMILIES if family != "phi3"], "llama", "gemma3"))
def test_all_techniques_together_act_train_and_reload(family, tmp_path):
    """Scaled RoPE, adapters and checkpointing in every family; then plain peft loads the result."""
    from peft import PeftModel
    from transformers import AutoConfig, AutoModelForCausalLM

    base = on_disk(tmp_path / "base", family)
    model, pipeline = ModelConfig(path=str(base)), everything()
    prepared = prepared_model(pipeline, model, sequence_length=256)
    mine = prepared.module
    evidence = pipeline.prove(prepared, make_probe(mine))
    assert {observation.technique for observation in evidence} == {
        "rope",
        "attention",
        "precision",
        "lora",
        "checkpointing",
    }
    expected = logits(trained(mine))
    adapter = save_model(prepared, load_tokenizer(model), tmp_path / "adapter")
    plain = AutoModelForCausalLM.from_pretrained(base, config=AutoConfig.from_pretrained(adapter), dtype=torch.float32)
    torch.testing.assert_close(logits(PeftModel.from_pretrained(plain, adapter)), expected, rtol=1e-6, atol=1e-6)


def test_check_reports_all_reasons_of_all_techniques_with_their_keys():
    pipeline = everything()
    pipeline.rope.factor = 1.0
    pipeline.lora.target_modules = ["nothing"]
    pipeline.checkpointing.every = 9
    with pytest.raises(ConfigError) as caught:
        pipeline.check(facts_of(random_model("llama")))
    keys = [line.split(":")[0].strip() for line in str(caught.value).splitlines()[1:]]
    assert keys == [
        "techniques.rope.factor",
        "techniques.lora.target_modules",
        "techniques.checkpointing.every",
    ]


def test_a_disabled_technique_is_neither_checked_nor_applied():
    pipeline = Pipeline()
    pipeline.rope.factor, pipeline.lora.r = -1.0, -1
    assert type(built(pipeline, random_model("llama"))).__name__ == "LlamaForCausalLM"


def test_check_asks_for_a_missing_technique():
    pipeline = Pipeline()
    pipeline.attention.enabled = False
    with pytest.raises(ConfigError) as caught:
        pipeline.check(facts_of(random_model("llama"), sequence_length=65, dtype="float16"))
    for part in (
        "techniques.attention.enabled",
        "techniques.lora.enabled",
        "techniques.rope.enabled",
        "beyond the 64 positions",
        "data.sequence_length=64",
    ):
        assert part in str(caught.value)
    pipeline.check(facts_of(random_model("llama"), packing=False))


def test_build_changes_neither_the_config_nor_the_random_state():
    model, pipeline = random_model("llama"), everything()
    config = load_config(model)
    before = config.to_dict()
    torch.manual_seed(9)
    expected = torch.rand(2)
    torch.manual_seed(9)
    assemble(pipeline, model, config, CPU, 0)
    assert torch.equal(torch.rand(2), expected)
    assert config.to_dict() == before


def test_a_bfloat16_base_trains_with_all_techniques():
    model, pipeline = random_model("llama"), everything()
    model.dtype = DType.bfloat16
    prepared = prepared_model(pipeline, model, dtype="bfloat16")
    mine = prepared.module
    pipeline.prove(prepared, make_probe(mine))
    with pipeline.precision.context(CPU.device):
        mine.train()(**make_probe(mine)).logits.float().logsumexp(-1).sum().backward()
    assert all(parameter.grad.dtype is torch.float32 for parameter in mine.parameters() if parameter.requires_grad)


def test_a_probe_of_one_document_does_not_verify_packing():
    prepared = prepared_model(Pipeline(), random_model("llama"))
    model = prepared.module
    questions = [evidence.asked for evidence in Pipeline().verify(prepared, make_probe(model, packing=False))]
    assert not any("packed" in line for line in questions)
    assert any("packed" in evidence.asked for evidence in Pipeline().verify(prepared, make_probe(model)))


def test_options_of_a_disabled_technique_are_reported():
    assert Pipeline().ignored_options() == []
    checkpointing = Checkpointing(policy=Policy.selective)
    assert Pipeline(checkpointing=checkpointing).ignored_options() == [
        "checkpointing: off, so policy=selective has no effect. To use it: techniques.checkpointing.enabled=true"
    ]
    assert Pipeline(checkpointing=dataclasses.replace(checkpointing, enabled=True)).ignored_options() == []


@pytest.mark.parametrize(
    ("lora", "liger", "device", "owner"),
    [
        ({}, {}, "cuda", "lora"),
        ({"fused": "on"}, {}, "cpu", "lora"),
        ({}, {}, "cpu", ""),
        ({}, {"kernels": ["swiglu"]}, "cuda", "liger"),
        ({"fused": "on"}, {"kernels": ["swiglu"]}, "cuda", "lora"),
        ({"fused": "off"}, {"kernels": ["swiglu"]}, "cuda", ""),
        ({"dropout": 0.1}, {}, "cuda", ""),
        ({"target_modules": ["q_proj"]}, {}, "cuda", ""),
    ],
)
def test_mlp_kernel_decides_between_fused_lora_and_liger(lora, liger, device, owner):
    pipeline = enable(lora=lora, liger=liger)
    facts = facts_of(random_model("llama"), device=device, dtype="bfloat16", techniques=pipeline)
    assert mlp_kernel(facts) == owner


@pytest.mark.parametrize(
    ("options", "off"),
    [
        ({}, ["compile: off, because rows of any length would each compile again"]),
        ({"fullgraph": False}, None),
    ],
)
def test_auto_is_off_where_it_cannot_act_and_true_is_refused(options, off):
    pipeline, facts = lora(), facts_of(random_model("llama"), packing=False, rows=())
    pipeline.compile = Compile(enabled="auto", **options)
    if off is None:
        with pytest.raises(ConfigError, match=r"techniques\.compile\.enabled: rows of any length"):
            pipeline.resolved(facts)
        return
    chosen, notes = pipeline.resolved(facts)
    assert chosen.compile.enabled is False
    assert [line for line in notes if line.startswith("compile: ")] == off
    pipeline.compile.enabled = True
    with pytest.raises(ConfigError, match=r"techniques\.compile\.enabled: rows of any length"):
        pipeline.resolved(facts)


def test_auto_liger_keeps_what_serves_any_model():
    pipeline = lora()
    pipeline.liger = Liger(enabled="auto")
    facts = facts_of(tiny_model("qwen3_moe"), packing=True, rows=(4096,), micro_batch_size=64)
    facts.model["vocab_size"] = 65536
    chosen, notes = pipeline.resolved(facts)
    assert chosen.liger.enabled is True
    assert chosen.liger.kernels == ["fused_linear_cross_entropy"]
    assert any("its kernels off (they are known for other models than qwen3_moe)" in line for line in notes)
    pipeline.liger.kernels = ["rms_norm"]
    with pytest.raises(ConfigError, match=r"techniques\.liger\.kernels: Liger's are known for"):
        pipeline.resolved(facts)
