"""Experts of a mixture in fp8 without their speed, and in 4 bits: what is stored, computed, saved and refused, on a CPU.

check() refuses fp8 on a CPU, so its tests call assemble(), and products run by the plain reference.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.architectures import CPU, built, facts_of, logits, lora, on_disk, trained
from support.cases import slow_but
from support.mixtures import mixture, uneven
from support.mxfp4 import in_mxfp4

from fxtune.distributed.parallel import Degrees
from fxtune.errors import StorageError
from fxtune.estimate.memory import forecast
from fxtune.estimate.step_time import layer_time
from fxtune.export.save import save_model
from fxtune.facts.options import DType, Switch, WeightFormat
from fxtune.facts.recomputation import RecomputePlan
from fxtune.kernels.fp8 import Weight
from fxtune.kernels.fp8_experts import dequantize_experts
from fxtune.models.experts import experts_of
from fxtune.models.load import ModelConfig, load_config, load_tokenizer, ships_mxfp4
from fxtune.models.prepared import PreparedModel
from fxtune.outputs.merge import merge
from fxtune.techniques.assemble import assemble
from fxtune.techniques.compile.technique import Compile
from fxtune.techniques.experts import quantized as quantized_experts
from fxtune.techniques.experts.adapted import grouped, observe_experts
from fxtune.techniques.experts.quantized import dequantize, stored_bytes
from fxtune.techniques.pipeline import Pipeline, make_probe
from fxtune.techniques.quantize.technique import Quantize
from fxtune.techniques.quantized_modules import is_quantized

H200 = dict(device="cuda", device_name="NVIDIA H200", capability=(9, 0), dtype="bfloat16")


def fp8(experts: Switch = Switch.on, transposes: bool = True, **options: Any) -> Pipeline:
    pipeline = lora(**options)
    pipeline.quantize = Quantize(True, WeightFormat.fp8, compute_dtype=DType.float32, experts=experts)
    pipeline.quantize.keeps_transposes = transposes
    return pipeline


def prepared_model(pipeline: Pipeline, model: ModelConfig) -> PreparedModel:
    """support's prepared_model() without check()."""
    return assemble(pipeline, model, load_config(model), CPU, 0)


def made(pipeline: Pipeline, model: ModelConfig) -> Any:
    return prepared_model(pipeline, model).module


def resolved(model: ModelConfig, pipeline: Pipeline, **facts: Any) -> tuple[Quantize, str]:
    """What techniques.quantize decides on an H200, and what it says."""
    pipeline.quantize.compute_dtype = DType.auto
    facts = facts_of(model, **H200, **facts)
    decided = dataclasses.replace(pipeline.quantize)
    return decided, decided.resolve(dataclasses.replace(facts, techniques=pipeline)) or ""


@pytest.mark.parametrize(("kind", "transposes"), [("qwen3_moe", True), ("granitemoe", False)])
def test_a_mixture_over_fp8_experts_is_close_to_its_base_and_its_experts_learn(kind, transposes):
    model, pipeline = mixture(kind), fp8(transposes=transposes)
    prepared, plain = prepared_model(pipeline, model), built(lora(), model, packing=False)
    mine = prepared.module
    experts = list(experts_of(mine))
    assert len(experts) == len(grouped(mine)) == 2
    assert {one.stored_as for one in experts} == {"fp8"}
    for one, other in zip(experts, experts_of(plain), strict=True):
        for codes, exact in zip(one.stored_weights(), (other.gate_up_proj, other.down_proj), strict=True):
            weights = Weight(*codes)
            found = dequantize_experts(weights.codes, weights.scales, torch.float32)
            assert 0 < (found - exact).norm() / exact.norm() < 0.04
            assert (weights.back is None) is not transposes
    assert 0 < (logits(mine) - logits(plain)).norm() / logits(plain).norm() < 0.1
    seen = observe_experts(mine, make_probe(mine))
    assert (seen.layers, seen.grouped) == (2, 2)
    assert 0 < seen.reached == seen.learning
    evidence = {one.asked: one for one in pipeline.verify(prepared, make_probe(mine)) if one.technique == "quantize"}
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


@pytest.mark.slow
def test_layers_over_fp8_experts_are_one_graph(monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    pipeline = fp8()
    pipeline.compile = Compile(enabled=True)
    prepared = prepared_model(pipeline, mixture("qwen3_moe"))
    mine = prepared.module
    evidence = list(pipeline.compile.verify(prepared, make_probe(mine)))
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
    prepared = trained(prepared_model(fp8(), model))
    mine = prepared.module
    adapter = save_model(prepared, load_tokenizer(model), tmp_path / "adapter")
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
    monkeypatch.setattr(quantized_experts, "SMALL", small)
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
    demanded.quantize.compute_dtype = DType.auto
    facts = dataclasses.replace(facts_of(model, **H200), techniques=demanded)
    reasons = [one for one in demanded.quantize.check(facts) if one.startswith("experts: ")]
    assert [why in one for one in reasons] == [True] * bool(why)


@pytest.mark.parametrize(("degrees", "why"), [((2, 1), ""), ((2, 2), ""), ((3, 1), "3 ranks"), ((2, 4), "8 ranks")])
def test_ranks_that_cannot_have_equally_many_experts_keep_them_in_16_bits(degrees, why):
    shard, context = degrees
    decided, said = resolved(mixture("qwen3_moe"), fp8(Switch.auto), degrees=Degrees(shard=shard, context=context))
    assert decided.experts is (Switch.off if why else Switch.on)
    assert (f"({why} cannot have equally many of them)" if why else "experts in fp8, too") in said


def test_a_check_knows_what_auto_will_decide():
    """Beside experts in fp8 the small linears stay in 16 bits, so the gate with one output is no obstacle."""
    model, pipeline = mixture("qwen2_moe"), fp8(Switch.auto)
    pipeline.quantize.compute_dtype = DType.auto
    facts = dataclasses.replace(facts_of(model, **H200), techniques=pipeline)
    assert not [one for one in pipeline.quantize.check(facts) if "shared_expert_gate" in one]
    pipeline.quantize.experts = Switch.off
    assert [one for one in pipeline.quantize.check(facts) if "shared_expert_gate" in one]


def test_one_decision_says_whether_linears_are_in_fp8_beside_experts(monkeypatch):
    """Memory, time and what is quantized follow it."""
    model = mixture("qwen3_moe", hidden_size=128, moe_intermediate_size=128)
    seen = []
    for small in (quantized_experts.SMALL, 0):
        monkeypatch.setattr(quantized_experts, "SMALL", small)
        pipeline = fp8(Switch.auto, False)
        pipeline.quantize, said = resolved(model, pipeline)
        pipeline.quantize.keeps_transposes = False
        assert ("other linears stay in bfloat16 (all are small)" in said) is bool(small)
        facts = dataclasses.replace(facts_of(model, **H200), techniques=pipeline)
        seen.append((forecast(facts, RecomputePlan()).weights, layer_time(facts).narrow))
    assert seen[1][0] < seen[0][0]
    assert seen[1][1] < seen[0][1]


def test_skip_keeps_experts_with_a_tensor_of_that_name_in_16_bits():
    pipeline = fp8(Switch.auto)
    pipeline.quantize.skip = ["down_proj"]
    decided, said = resolved(mixture("glm4_moe"), pipeline)
    assert decided.experts is Switch.off
    assert "skip=down_proj names a part of the experts" in said


def test_a_model_without_experts_has_none_in_fp8():
    from support.architectures import random_model

    decided, said = resolved(random_model("llama"), fp8(Switch.auto))
    assert decided.experts is Switch.off
    assert "experts" not in said


SIZES = {"hidden_size": 64, "intermediate_size": 128}


def packing(kind: str, **options: Any) -> Pipeline:
    pipeline = lora(**options)
    pipeline.quantize = Quantize(True, WeightFormat(kind))
    return pipeline


def decided(pipeline: Pipeline, model: ModelConfig, **known: Any) -> tuple[Pipeline, list[str]]:
    shipped = ships_mxfp4(model, load_config(model))
    return pipeline.resolved(facts_of(model, packing=False, ships_mxfp4=shipped, **known))


def packed(kind: str, model: ModelConfig, **options: Any) -> tuple[Pipeline, PreparedModel]:
    pipeline, _ = decided(packing(kind, **options), model)
    return pipeline, prepared_model(pipeline, model)


def shipped(folder) -> ModelConfig:
    """gpt-oss whose experts are stored in MXFP4."""
    in_mxfp4(on_disk(folder, model=mixture("gpt_oss", **SIZES)))
    return ModelConfig(path=str(folder))


def proven(pipeline: Pipeline, prepared: PreparedModel) -> dict[str, Any]:
    model = prepared.module
    every = pipeline.verify(prepared, make_probe(model, packing=False))
    assert all(one.acted for one in every), [one for one in every if not one.acted]
    seen = observe_experts(model, make_probe(model, packing=False))
    assert (seen.layers, seen.grouped, seen.experts) == (2, 2, 8)
    return {one.asked: one for one in every if one.technique == "quantize"}


def unpacked_copy(mine: Any, model: ModelConfig) -> Any:
    """The adapted model over the dequantized experts of `mine`, in the layout of transformers."""
    plain = built(lora(), model, packing=False)
    for one, other in zip(experts_of(mine), experts_of(plain), strict=True):
        for name, codes, shape in zip(
            ("gate_up_proj", "down_proj"), one.stored_weights(), one.matrix_shapes(), strict=True
        ):
            weight = dequantize(one.stored_as, codes, shape, torch.float32)
            getattr(other, name).data.copy_(weight.mT if one.is_transposed else weight)
    weights = dict(mine.named_parameters())
    for name, parameter in plain.named_parameters():
        if "lora_" in name:
            parameter.data.copy_(weights[name])
    return plain


def gradients(model: Any) -> dict[str, torch.Tensor]:
    (model(**make_probe(model, packing=False)).logits.float().logsumexp(-1).sum()).backward()
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


@pytest.mark.parametrize(("family", "kind"), [("gpt_oss", "mxfp4"), ("qwen3_moe", "nf4")])
def test_a_mixture_over_packed_experts_equals_the_one_over_what_they_dequantize_to(family, kind):
    sizes = {"moe_intermediate_size": 64} if family == "qwen3_moe" else {}
    model = mixture(family, **SIZES, **sizes)
    pipeline, prepared = packed(kind, model)
    mine = prepared.module
    proven(pipeline, prepared)
    if kind == "nf4":  # whose linears are quantized, too
        assert {one.stored_as for one in experts_of(mine)} == {"nf4"}
        return
    for name, one in mine.named_parameters():
        if "lora_B" in name:
            one.data.normal_(std=0.05, generator=torch.Generator().manual_seed(len(name)))
    plain = unpacked_copy(mine, model)
    torch.testing.assert_close(logits(mine), logits(plain), rtol=1e-5, atol=1e-5)
    found, wanted = gradients(mine), gradients(plain)
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", slow_but(["mxfp4", "nf4"], "mxfp4"))
def test_experts_that_a_checkpoint_ships_in_mxfp4_are_read_as_they_are(kind, tmp_path, monkeypatch):
    model = shipped(tmp_path)
    pipeline, notes = decided(packing(kind), model)
    assert any("as the checkpoint stores them" in note for note in notes)
    monkeypatch.setattr("fxtune.models.weights.read", None)  # which would unpack them
    prepared = prepared_model(pipeline, model)
    mine = prepared.module
    monkeypatch.undo()
    evidence = proven(pipeline, prepared)
    assert "4 tensors read as they are" in evidence["the experts that the checkpoint has in MXFP4, unchanged"].observed
    held = sum(stored_bytes(one) for one in experts_of(mine))
    count = 2 * 4 * (64 * 256 + 128 * 64)
    assert held == count * 17 / 32, "4.25 bits a weight"
    biggest = max(one.nbytes for one in (*mine.parameters(), *mine.buffers()))
    assert biggest < 2 * count / 4
    assert not any(one.is_meta for one in mine.parameters())
    if kind == "mxfp4":
        plain = built(lora(), model, packing=False)
        torch.testing.assert_close(logits(mine), logits(plain), rtol=0, atol=1e-6)


def test_a_copy_of_gpt_oss_in_16_bits_is_packed_to_the_numbers_that_it_has(tmp_path):
    gpt_oss = mixture("gpt_oss", **SIZES)
    numbers = in_mxfp4(on_disk(tmp_path / "shipped", model=gpt_oss))
    copy = on_disk(tmp_path / "copy", model=gpt_oss)
    file = copy / "model.safetensors"
    save_file({**load_file(file), **{name: weight.contiguous() for name, weight in numbers.items()}}, file)
    evidence = proven(*packed("mxfp4", ModelConfig(path=str(copy))))
    assert any("0.0000 at most" in entry.observed for entry in evidence.values())


@pytest.mark.parametrize(
    "kind", slow_but(["fp8", "fp8 without transposes", "nf4", "int8", "mxfp4", "linears alone"], "fp8", "nf4")
)
def test_experts_of_a_model_that_fits_nowhere_are_quantized_as_they_are_read(kind, tmp_path, monkeypatch):
    """The same bits as of a model that is read whole, from files that store each expert apart."""
    model = ModelConfig(path=str(on_disk(tmp_path, model=mixture("qwen3_moe", **SIZES, moe_intermediate_size=64))))
    assert any(".experts.3." in name for name in load_file(tmp_path / "model.safetensors"))
    if kind.startswith("fp8"):
        pipeline = fp8(transposes="without" not in kind)
    else:
        pipeline = packing("nf4" if kind == "linears alone" else kind)
        pipeline.quantize.experts = Switch.off if kind == "linears alone" else Switch.on
        pipeline, _ = decided(pipeline, model)
    whole = made(pipeline, model)
    monkeypatch.setattr("fxtune.techniques.assemble._quantizes_rows", lambda *_: True)
    monkeypatch.setattr("fxtune.models.weights.read", None)
    prepared = prepared_model(pipeline, model)
    mine = prepared.module
    assert mine.state_dict().keys() == whole.state_dict().keys()
    assert not any(parameter.is_meta for parameter in mine.parameters())
    assert torch.equal(logits(mine), logits(whole))
    evidence = pipeline.verify(prepared, make_probe(mine, packing=False))
    assert [seen.asked for seen in evidence if seen.technique == "quantize" and not seen.acted] == []
    if kind != "linears alone":
        for read, packed in zip(experts_of(mine), experts_of(whole), strict=True):
            for stored, expected in zip(read.stored_weights(), packed.stored_weights(), strict=True):
                assert all(map(torch.equal, stored, expected))


@pytest.mark.parametrize(("family", "kind"), [("gpt_oss", "mxfp4"), ("qwen3_moe", "nf4")])
def test_drawn_experts_that_fit_nowhere_are_packed_one_tensor_at_a_time(family, kind, monkeypatch):
    """The same bits as of a model that is drawn whole."""
    model = mixture(family, **SIZES, **({"moe_intermediate_size": 64} if kind == "nf4" else {}))
    pipeline, _ = decided(packing(kind), model)
    whole = made(pipeline, model)
    monkeypatch.setattr("fxtune.techniques.assemble._quantizes_rows", lambda *_: True)
    prepared = prepared_model(pipeline, model)
    proven(pipeline, prepared)
    assert torch.equal(logits(prepared.module), logits(whole))
    for drawn, packed in zip(experts_of(prepared.module), experts_of(whole), strict=True):
        for stored, expected in zip(drawn.stored_weights(), packed.stored_weights(), strict=True):
            assert all(map(torch.equal, stored, expected))


@pytest.mark.parametrize("kind", ["fp8", "nf4"])
def test_a_damaged_expert_is_found_as_the_experts_are_read(kind, tmp_path, monkeypatch):
    on_disk(tmp_path, model=mixture("qwen3_moe", **SIZES, moe_intermediate_size=64))
    file, name = tmp_path / "model.safetensors", "model.layers.1.mlp.experts.2.down_proj.weight"
    stored = load_file(file)
    stored[name][0, 0] = torch.inf
    save_file(stored, file, {"format": "pt"})
    model = ModelConfig(path=str(tmp_path))
    monkeypatch.setattr("fxtune.techniques.assemble._quantizes_rows", lambda *_: True)
    pipeline = fp8() if kind == "fp8" else decided(packing(kind), model)[0]
    with pytest.raises(StorageError, match=rf"hold NaN or infinite numbers.*, in {name}\. Use"):
        prepared_model(pipeline, model)


def test_options_that_need_whole_weights_unpack_the_shipped_experts_and_pack_them_again(tmp_path):
    model = shipped(tmp_path)
    pipeline, prepared = packed("mxfp4", model, modules_to_save=["lm_head"])
    mine = prepared.module
    evidence = proven(pipeline, prepared)
    seen = evidence["the experts that the checkpoint has in MXFP4, unchanged"].observed
    assert "unpacked and packed again, relative error 0" in seen
    direct = packed("mxfp4", model)[1].module
    for one, other in zip(experts_of(mine), experts_of(direct), strict=True):
        for here, there, shape in zip(one.stored_weights(), other.stored_weights(), one.matrix_shapes(), strict=True):
            numbers = [dequantize("mxfp4", codes, shape, torch.float32) for codes in (here, there)]
            assert torch.equal(*numbers)


def test_a_damaged_exponent_is_found_as_the_experts_are_read(tmp_path):
    from safetensors.torch import load_file, save_file

    model = shipped(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj_scales"
    tensors[name][0, 0, 0] = 255
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(StorageError, match="NaN or infinite"):
        packed("mxfp4", model)


def test_two_steps_over_packed_experts_learn_and_the_adapter_is_for_the_plain_base(tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = shipped(tmp_path / "base")
    _, prepared = packed("mxfp4", model)
    mine = prepared.module
    before = mine(**make_probe(mine, packing=False)).logits.float().logsumexp(-1).sum().item()
    assert trained(mine)(**make_probe(mine, packing=False)).logits.float().logsumexp(-1).sum().item() < before
    adapter = save_model(prepared, load_tokenizer(model), tmp_path / "adapter")
    base = made(Pipeline(), model)  # unpacked
    theirs = PeftModel.from_pretrained(base, adapter)
    ours = dict(mine.named_parameters())
    weights = {name: one for name, one in theirs.named_parameters() if "lora_" in name}
    assert any(".experts." in name for name in weights)
    assert all(torch.equal(one, ours[name]) for name, one in weights.items())
    torch.testing.assert_close(logits(theirs), logits(mine), rtol=1e-4, atol=1e-4)
    merged = AutoModelForCausalLM.from_pretrained(merge(adapter, tmp_path / "merged"), dtype="auto")
    row = make_probe(merged, packing=False)
    with torch.no_grad():
        torch.testing.assert_close(merged(**row).logits, theirs(**row).logits.float(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["mxfp4", "fp8"])
def test_recomputed_layers_over_quantized_experts_have_the_same_gradients(kind):
    model = mixture("qwen3_moe", moe_intermediate_size=64)
    pipeline = fp8() if kind == "fp8" else decided(packing(kind), model)[0]
    wanted = gradients(made(pipeline, model))
    pipeline.checkpointing.enabled, pipeline.checkpointing.every = True, 1
    found = gradients(made(pipeline, model).train())
    assert wanted.keys() == {name.replace("_checkpoint_wrapped_module.", "") for name in found}
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[name.replace("_checkpoint_wrapped_module.", "")])


@pytest.mark.vital
def test_layers_over_packed_experts_are_one_graph(monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    pipeline, _ = decided(packing("mxfp4"), model := mixture("gpt_oss", **SIZES))
    pipeline.compile = Compile(enabled=True)
    prepared = prepared_model(pipeline, model)
    mine = prepared.module
    evidence = list(pipeline.compile.verify(prepared, make_probe(mine, packing=False)))
    assert all(one.acted for one in evidence), evidence


@pytest.mark.parametrize("kind", ["mxfp4", "nf4"])
def test_the_forecast_of_packed_experts_is_right(kind):
    model = mixture("qwen3_moe", hidden_size=128, moe_intermediate_size=128)
    pipeline, prepared = packed(kind, model)
    mine = prepared.module
    held = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for module in mine.modules()
        for _, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    }
    facts = dataclasses.replace(facts_of(model, micro_batch_size=1), techniques=pipeline)
    need = forecast(facts, RecomputePlan())
    assert need.weights == pytest.approx(sum(held.values()), rel=0.05)
    pipeline.quantize.experts = Switch.off
    assert forecast(facts, RecomputePlan()).weights > 1.5 * need.weights


@pytest.mark.parametrize(
    ("kind", "model", "options", "why"),
    [
        ("mxfp4", {}, {}, "mxfp4 has blocks of 32 numbers, and rows of experts have 40"),
        ("nf4", {}, {"modules_to_save": ["experts"]}, "modules_to_save=experts trains whole experts"),
    ],
)
def test_auto_packs_experts_where_it_can_and_says_why_not(kind, model, options, why):
    model, pipeline = mixture("qwen3_moe", moe_intermediate_size=40), packing(kind, **options)
    facts = dataclasses.replace(facts_of(model, packing=False), techniques=pipeline)
    if kind == "mxfp4":
        assert any(why in reason for reason in pipeline.quantize.check(facts))
        return
    assert why in (pipeline.quantize.resolve(facts) or "")
    assert pipeline.quantize.experts is Switch.off


def test_mxfp4_of_a_model_without_experts_is_refused():
    from support.architectures import random_model

    pipeline = packing("mxfp4")
    facts = dataclasses.replace(facts_of(random_model("llama")), techniques=pipeline)
    (reason,) = pipeline.quantize.check(facts)
    assert reason.startswith("type: mxfp4 is for the experts of a mixture, and this model has no experts")
