"""Experts of a mixture in fp8 without their speed: what is stored, computed, saved and refused, on a CPU.

check() refuses a CPU, so these tests call Pipeline.build(), and products run by the plain reference.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from support.architectures import CPU, built, facts_of, logits, lora, on_disk, trained
from support.mixtures import mixture, uneven

from fxtune.cli.merge import merge
from fxtune.kernels.fp8_experts import dequantize_experts
from fxtune.models.load import ModelConfig, load_config, load_tokenizer
from fxtune.models.save import save_model
from fxtune.techniques import quantize
from fxtune.techniques.base import Switch
from fxtune.techniques.compile.technique import Compile
from fxtune.techniques.estimate.memory import RecomputePlan, forecast
from fxtune.techniques.estimate.step_time import layer_time
from fxtune.techniques.lora.experts import grouped, observe_experts
from fxtune.techniques.pipeline import Pipeline, make_probe
from fxtune.techniques.quantize import ComputeDtype, Quantize, Type
from fxtune.techniques.quantized_experts import experts_of, in_fp8
from fxtune.techniques.quantized_modules import is_quantized

H200 = dict(device="cuda", device_name="NVIDIA H200", capability=(9, 0), dtype="bfloat16")


def fp8(experts: Switch = Switch.on, transpose: Switch = Switch.on, **options: Any) -> Pipeline:
    pipeline = lora(**options)
    pipeline.quantize = Quantize(
        True, Type.fp8, compute_dtype=ComputeDtype.float32, experts=experts, transpose=transpose
    )
    return pipeline


def made(pipeline: Pipeline, model: ModelConfig) -> Any:
    return pipeline.build(model, load_config(model), CPU, 0)


def resolved(model: ModelConfig, pipeline: Pipeline, **facts: Any) -> tuple[Quantize, str]:
    """What techniques.quantize decides on an H200, and what it says."""
    pipeline.quantize.compute_dtype = ComputeDtype.auto
    facts = facts_of(model, **H200, **facts)
    decided = dataclasses.replace(pipeline.quantize)
    return decided, decided.resolve(dataclasses.replace(facts, techniques=pipeline)) or ""


@pytest.mark.parametrize("transpose", [Switch.on, Switch.off])
@pytest.mark.parametrize("kind", ["qwen3_moe", "granitemoe"])
def test_a_mixture_over_fp8_experts_is_close_to_its_base_and_its_experts_learn(kind, transpose):
    model, pipeline = mixture(kind), fp8(transpose=transpose)
    mine, plain = made(pipeline, model), built(lora(), model, packing=False)
    experts = list(experts_of(mine))
    assert len(experts) == len(grouped(mine)) == 2
    assert all(map(in_fp8, experts))
    for one, other in zip(experts, experts_of(plain), strict=True):
        for weights, exact in zip(one.fp8_weights(), (other.gate_up_proj, other.down_proj), strict=True):
            found = dequantize_experts(weights.codes, weights.scales, torch.float32)
            assert 0 < (found - exact).norm() / exact.norm() < 0.04
            assert (weights.back is None) is (transpose is Switch.off)
    assert 0 < (logits(mine) - logits(plain)).norm() / logits(plain).norm() < 0.1
    seen = observe_experts(mine, make_probe(mine))
    assert (seen.layers, seen.grouped) == (2, 2)
    assert 0 < seen.reached == seen.learning
    evidence = {one.asked: one for one in pipeline.verify(mine, make_probe(mine)) if one.technique == "quantize"}
    assert evidence["the experts of 2 layers as one operator in fp8"].acted
    assert evidence["0 linears and the experts of 2 layers in fp8"].acted
    assert evidence["weights close to the base's (relative error below 0.04)"].acted
    assert {parameter.dtype for name, parameter in mine.named_parameters() if "lora_" in name} == {torch.float32}


def test_two_steps_over_fp8_experts_end_at_the_loss_of_the_plain_base():
    ids = torch.randint(3, 60, (4, 48), generator=torch.Generator().manual_seed(5))
    ends = {}
    for name, mine in (
        ("plain", uneven(built(lora(r=8), mixture("qwen3_moe"), packing=False))),
        ("fp8", made(fp8(r=8), mixture("qwen3_moe"))),
    ):
        mine.train()
        optimizer = torch.optim.AdamW([one for one in mine.parameters() if one.requires_grad], lr=5e-3)
        losses = []
        for _ in range(2):
            loss = mine(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        ends[name] = losses
    assert ends["fp8"][-1] < ends["fp8"][0]


def test_layers_over_fp8_experts_are_one_graph(monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    pipeline = fp8()
    pipeline.compile = Compile(enabled=True)
    mine = made(pipeline, mixture("qwen3_moe"))
    evidence = list(pipeline.compile.verify(mine, make_probe(mine)))
    assert all(one.acted for one in evidence), evidence


@pytest.mark.parametrize("names", [["down_proj", "q_proj"], ["q_proj"]])
def test_experts_with_fewer_adapters(names):
    """Adapters on one of the two tensors, or on none: gradients still reach the layers below."""
    mine = made(fp8(target_modules=names), mixture("qwen3_moe"))
    plain = built(lora(target_modules=names), mixture("qwen3_moe"), packing=False)
    assert (logits(mine) - logits(plain)).norm() / logits(plain).norm() < 0.1
    mine.train()
    mine(**make_probe(mine)).logits.logsumexp(-1).sum().backward()
    halves = [one for name, one in mine.named_parameters() if "lora_B" in name]
    assert all(one.grad is not None and one.grad.any() for one in halves)


def test_the_adapter_loads_and_merges_onto_the_plain_base(tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = on_disk(tmp_path / "base", model=mixture("qwen3_moe"))
    model = ModelConfig(path=str(base))
    mine = trained(made(fp8(), model))
    adapter = save_model(mine, load_tokenizer(model), tmp_path / "adapter")
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter)
    ours = dict(mine.named_parameters())
    weights = {name: parameter for name, parameter in theirs.named_parameters() if "lora_" in name}
    assert any(".experts." in name for name in weights)
    assert all(torch.equal(parameter, ours[name]) for name, parameter in weights.items())
    assert (logits(theirs) - logits(mine)).norm() < 0.15 * logits(mine).norm()
    merged = AutoModelForCausalLM.from_pretrained(merge(adapter, tmp_path / "merged"), dtype="auto")
    torch.testing.assert_close(logits(merged), logits(theirs), rtol=0, atol=1e-5)
    with mine.disable_adapter():
        plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        assert (logits(mine) - logits(plain)).norm() < 0.1 * logits(plain).norm()


@pytest.mark.parametrize("small", [2**24, 1])
def test_the_forecast_of_fp8_experts_is_right(small, monkeypatch):
    """Also where other linears are large enough to be in fp8 with them."""
    monkeypatch.setattr(quantize, "SMALL", small)
    model = mixture("qwen3_moe", hidden_size=128, moe_intermediate_size=128)
    for experts in (Switch.on, Switch.off):
        pipeline = fp8(experts)
        mine = made(pipeline, model)
        linears = sum(map(is_quantized, mine.modules()))
        assert linears == (0 if (experts, small) == (Switch.on, 2**24) else 8)
        held = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for module in mine.modules()
            for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        }
        facts = dataclasses.replace(facts_of(model, micro_batch_size=1), techniques=pipeline)
        assert forecast(facts, RecomputePlan()).weights == pytest.approx(sum(held.values()), rel=0.05)


@pytest.mark.parametrize(
    ("kind", "changes", "options", "why"),
    [
        ("qwen3_moe", {}, {}, ""),
        ("gpt_oss", {}, {}, "GptOssExperts has biases or another layout"),
        ("qwen3_moe", {"moe_intermediate_size": 40}, {}, "a multiple of 16, and experts have one of 40"),
        ("qwen3_moe", {}, {"grouped_experts": Switch.off}, "grouped_experts=off adds adapters to whole weights"),
        ("qwen3_moe", {}, {"modules_to_save": ["mlp"]}, "modules_to_save=mlp trains whole experts"),
        ("qwen3_moe", {}, {"modules_to_save": ["experts"]}, "modules_to_save=experts trains whole experts"),
    ],
)
def test_auto_takes_fp8_where_experts_can_be_and_says_why_not(kind, changes, options, why):
    model = mixture(kind, **changes)
    decided, said = resolved(model, fp8(Switch.auto, Switch.auto, **options))
    assert decided.experts is (Switch.off if why else Switch.on)
    assert (why or "experts in fp8, too") in said
    demanded = fp8(**options)
    demanded.quantize.compute_dtype = ComputeDtype.auto
    facts = dataclasses.replace(facts_of(model, **H200), techniques=demanded)
    reasons = [one for one in demanded.quantize.check(facts) if one.startswith("experts: ")]
    assert [why in one for one in reasons] == [True] * bool(why)


def test_a_check_knows_what_auto_will_decide():
    """Beside experts in fp8 the small linears stay in 16 bits, so the gate with one output is no obstacle."""
    model, pipeline = mixture("qwen2_moe"), fp8(Switch.auto, Switch.auto)
    pipeline.quantize.compute_dtype = ComputeDtype.auto
    facts = dataclasses.replace(facts_of(model, **H200), techniques=pipeline)
    assert not [one for one in pipeline.quantize.check(facts) if "shared_expert_gate" in one]
    pipeline.quantize.experts = Switch.off
    assert [one for one in pipeline.quantize.check(facts) if "shared_expert_gate" in one]


def test_one_decision_says_whether_linears_are_in_fp8_beside_experts():
    """Memory, time and what is quantized follow it; a recipe may take the other one."""
    model = mixture("qwen3_moe", hidden_size=128, moe_intermediate_size=128)
    seen = {}
    for wish in Switch:
        pipeline = fp8(Switch.auto, Switch.off)
        pipeline.quantize.linears = wish
        decided, said = resolved(model, pipeline)
        assert ("other linears stay in bfloat16 (all are small)" in said) is (wish is Switch.auto)
        pipeline.quantize = decided
        facts = dataclasses.replace(facts_of(model, **H200), techniques=pipeline)
        seen[wish] = forecast(facts, RecomputePlan()).weights, layer_time(facts).narrow, decided.linears
    assert seen[Switch.auto] == seen[Switch.off]
    assert seen[Switch.auto][2] is Switch.off
    assert seen[Switch.on][0] < seen[Switch.off][0]
    assert seen[Switch.on][1] < seen[Switch.off][1]


def test_skip_keeps_experts_with_a_tensor_of_that_name_in_16_bits():
    pipeline = fp8(Switch.auto)
    pipeline.quantize.skip = ["down_proj"]
    decided, said = resolved(mixture("glm4_moe"), pipeline)
    assert decided.experts is Switch.off
    assert "skip=down_proj names a part of them" in said


def test_a_model_without_experts_and_other_types_have_none_in_fp8():
    from support.architectures import random_model

    decided, said = resolved(random_model("llama"), fp8(Switch.auto, Switch.auto))
    assert decided.experts is Switch.off
    assert "experts" not in said
    pipeline = fp8(Switch.auto)
    pipeline.quantize.type = Type.nf4
    assert resolved(mixture("qwen3_moe"), pipeline)[0].experts is Switch.off
    pipeline.quantize.experts = Switch.on
    facts = dataclasses.replace(facts_of(mixture("qwen3_moe"), **H200), techniques=pipeline)
    assert any("type is nf4, and experts can be in fp8 only" in one for one in pipeline.quantize.check(facts))
