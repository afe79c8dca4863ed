"""Adapted experts as grouped matmuls: the same numbers as plain transformers and peft, one graph, evidence, saving."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path

import pytest
import torch
from support import image_models
from support.architectures import (
    CPU,
    SIZES,
    built,
    enable,
    logits,
    lora,
    on_disk,
    prepared_model,
    trained,
    word_tokenizer,
)
from support.cases import slow_but
from support.checkpointing import traced
from support.lora_models import loss_and_gradients, require_close
from support.mixtures import mixture, uneven
from torch._subclasses import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

from fxtune.errors import ConfigError, StorageError
from fxtune.export.save import save_model
from fxtune.facts.options import Policy
from fxtune.kernels.matmul import CUTE
from fxtune.models.load import Init, ModelConfig, load_config, load_tokenizer
from fxtune.models.prepared import PreparedModel
from fxtune.models.structure import decoder_layers
from fxtune.outputs.merge import merge
from fxtune.techniques.assemble import assemble
from fxtune.techniques.checkpointing.technique import Checkpointing
from fxtune.techniques.experts.adapted import grouped, make_space, observe_experts
from fxtune.techniques.experts.full import compute_experts, observe_computed
from fxtune.techniques.lora import technique
from fxtune.techniques.pipeline import Pipeline, make_probe

LAYERS = {
    "deepseek_v3": 1,
    "glm4_moe": 1,
    "gpt_oss": 2,
    "granitemoe": 2,
    "mixtral": 2,
    "olmoe": 2,
    "qwen2_moe": 2,
    "qwen3_moe": 2,
}
"""Layers with experts of the tiny models."""


def in_peft_and_grouped(kind, monkeypatch, **options):
    """The same mixture with adapters, run by peft and as grouped matmuls."""
    with monkeypatch.context() as patch:
        patch.setattr(technique, "group_experts", lambda model: 0)
        plain = uneven(built(lora(**options), mixture(kind), packing=False))
    return plain, uneven(built(lora(**options), mixture(kind), packing=False))


@pytest.mark.parametrize("kind", slow_but(LAYERS, "gpt_oss", "qwen3_moe"))
def test_experts_as_plain_transformers_and_peft(kind, monkeypatch):
    plain, mine = in_peft_and_grouped(kind, monkeypatch)
    assert (len(grouped(plain)), len(grouped(mine))) == (0, LAYERS[kind])
    assert all(layer.expert_act is not None for layer in grouped(mine)), "not as one operator"
    require_close(loss_and_gradients(mine), loss_and_gradients(plain), 1e-5)


@pytest.mark.parametrize("rank", [3, 16])
def test_any_rank_and_another_scaling(rank, monkeypatch):
    plain, mine = in_peft_and_grouped("qwen3_moe", monkeypatch, r=rank, alpha=5.0, rslora=True)
    require_close(loss_and_gradients(mine), loss_and_gradients(plain), 1e-5)


@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_moe"])
def test_space_for_adapters_beside_the_weights_changes_no_number(kind):
    """On Hopper the operator has it (make_space). The weights keep their shapes and values, and merge as before."""
    model = uneven(built(lora(), mixture(kind), packing=False))
    wanted, before = loss_and_gradients(model), {name: value.clone() for name, value in model.state_dict().items()}
    merged = copy.deepcopy(model).merge_and_unload().state_dict()
    for experts in grouped(model):
        experts.gemm = CUTE
        make_space(experts)
        for name in ("gate_up_proj", "down_proj"):
            assert not getattr(experts.get_base_layer(), name).is_contiguous(), name
    require_close(loss_and_gradients(model), wanted, 1e-5)
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    again = model.merge_and_unload().state_dict()
    assert all(torch.equal(again[name], value) for name, value in merged.items())


def test_recomputed_layers_route_as_before():
    """A recomputation that chose other experts would change the gradients."""
    pipelines = lora(), lora()
    pipelines[1].checkpointing = Checkpointing(enabled=True)
    plain, again = (uneven(built(pipeline, mixture("qwen3_moe"), packing=False)) for pipeline in pipelines)
    wanted, found = loss_and_gradients(plain), loss_and_gradients(again)
    assert found[0] == wanted[0]
    assert all(torch.equal(found[1][name], gradient) for name, gradient in wanted[1].items())


@pytest.mark.slow
def test_a_compiled_recomputation_skips_the_operator_of_the_experts():
    """With the compiler's own cut between forward and backward, and no code generated."""
    pipelines = lora(), lora()
    pipelines[1].checkpointing = Checkpointing(enabled=True, policy=Policy.full)
    plain, again = (uneven(built(pipeline, mixture("qwen3_moe"), packing=True)) for pipeline in pipelines)
    layers = decoder_layers(again)
    traced(again)
    loss_and_gradients(again)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as trace:
        found = loss_and_gradients(again)
    names = [event.name for event in trace.events()]
    ran = [names.count(f"fxtune::gated_experts{part}") for part in ("", "_backward")]
    assert ran == [len(layers), len(layers)]
    require_close(found, loss_and_gradients(plain), 1e-5)


@pytest.mark.slow
def test_layers_with_experts_are_one_graph(monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    pipeline = enable(lora={"r": 4}, compile={})
    prepared = prepared_model(pipeline, mixture("qwen3_moe"), packing=True)
    model = uneven(prepared.module)
    evidence = list(pipeline.compile.verify(prepared, make_probe(model)))
    assert all(observation.acted for observation in evidence), evidence
    plain = uneven(built(lora(), mixture("qwen3_moe"), packing=True))
    require_close(loss_and_gradients(model), loss_and_gradients(plain), 1e-5)


@pytest.mark.slow
def test_gpt_oss_with_all_that_makes_it_fast(monkeypatch):
    """Packed rows in its own attention (the reference of FlashAttention-4), YaRN, recomputed and compiled layers."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    config = mixture("gpt_oss")

    def made(**techniques):
        pipeline = enable(lora={"r": 4}, rope={"factor": 4.0, "original_max_position_embeddings": 32}, **techniques)
        pipeline.attention.backend = "flash4"  # which check() refuses on a CPU
        pipeline.attention._packed = True
        return pipeline, uneven(assemble(pipeline, config, load_config(config), CPU, 0).module)

    (_, plain), (pipeline, model) = made(), made(compile={}, checkpointing={})
    assert all(layer.expert_act is not None for layer in grouped(model))
    require_close(loss_and_gradients(model), loss_and_gradients(plain), 1e-5)
    probe = make_probe(model)
    proofs = [
        evidence
        for part in (pipeline.attention, pipeline.rope, pipeline.compile)
        for evidence in part.verify(PreparedModel(model), probe)
    ]
    assert {observation.technique for observation in proofs} == {"attention", "rope", "compile"}
    assert all(observation.acted for observation in proofs), proofs


@pytest.mark.parametrize("kind", slow_but(LAYERS, "gpt_oss", "qwen3_moe"))
def test_whole_experts_as_plain_transformers(kind):
    """With full fine-tuning on a GPU and over ranks that divide experts."""
    plain, mine = (uneven(built(Pipeline(), mixture(kind), packing=False)) for _ in range(2))
    compute_experts(mine, everywhere=True)
    require_close(loss_and_gradients(mine), loss_and_gradients(plain), 1e-5)
    assert [*mine.state_dict()] == [*plain.state_dict()]
    assert mine.config.to_dict() == plain.config.to_dict()


def on_fake_gpu(kind: str, dtype: torch.dtype):
    """A model whose weights say that they are on a GPU, without memory."""
    model = built(Pipeline(), mixture(kind), packing=False)
    with FakeTensorMode(allow_non_fake_inputs=True):
        for module in model.modules():
            for name, weight in module._parameters.items():
                if weight is not None:
                    fake = torch.empty(weight.shape, dtype=dtype, device="cuda")
                    module._parameters[name] = torch.nn.Parameter(fake)
    return model


@pytest.mark.parametrize(
    ("kind", "dtype", "by_fxtune"),
    [
        ("qwen3_moe", torch.bfloat16, True),
        ("qwen3_moe", torch.float32, False),
        ("qwen3_moe", torch.float16, False),
        ("gpt_oss", torch.bfloat16, False),
    ],
)
def test_whole_experts_on_a_gpu_stay_with_transformers_in_other_dtypes_and_with_biases(kind, dtype, by_fxtune):
    model = on_fake_gpu(kind, dtype)
    before = model.get_experts_implementation()
    compute_experts(model)
    assert (model.get_experts_implementation() != before) == by_fxtune


def test_whole_experts_on_a_cpu_stay_with_transformers():
    model = built(Pipeline(), mixture("qwen3_moe"), packing=False)
    assert model.get_experts_implementation() == {"": "grouped_mm"}
    assert observe_computed(model, make_probe(model)) is None


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen3_vl_moe"])
def test_the_evidence_of_whole_experts_counts_the_operator(kind):
    reads_images = kind == "qwen3_vl_moe"
    model = image_models.model(kind) if reads_images else built(Pipeline(), mixture(kind), packing=False)
    probe = make_probe(model, packing=False)
    compute_experts(model, everywhere=True)
    assert observe_computed(model, probe).acted
    for module in model.modules():
        if hasattr(module, "expert_act"):
            module.expert_act = None  # then each product is an operator of its own
    assert not observe_computed(model, probe).acted


@pytest.mark.slow
def test_layers_with_whole_experts_are_one_graph(monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    pipeline = enable(compile={}, checkpointing={})
    prepared = prepared_model(pipeline, mixture("qwen3_moe"), packing=True)
    model = uneven(prepared.module)
    compute_experts(model, everywhere=True)
    evidence = list(pipeline.compile.verify(prepared, make_probe(model)))
    assert all(observation.acted for observation in evidence), evidence
    plain = uneven(built(Pipeline(), mixture("qwen3_moe"), packing=True))
    require_close(loss_and_gradients(model), loss_and_gradients(plain), 1e-5)


def test_the_evidence_counts_experts_that_learn():
    model = built(lora(), mixture("qwen3_moe"), packing=False)
    seen = observe_experts(model, make_probe(model))
    assert (seen.layers, seen.grouped, seen.experts) == (2, 2, 8)
    assert 0 < seen.reached == seen.learning <= 8


def test_experts_without_a_gradient_are_an_error(monkeypatch):
    """As in a library that trained none of 1,536 experts, silently."""
    from fxtune.techniques.experts import adapted as experts

    own = experts.run_experts
    monkeypatch.setattr(experts, "run_experts", lambda one, adapters, *rest: own(one, {}, *rest))
    pipeline = lora()
    prepared = prepared_model(pipeline, mixture("qwen3_moe"), packing=False)
    model = prepared.module
    with pytest.raises(ConfigError, match=r"experts that a small row reaches, 0 have a gradient"):
        pipeline.prove(prepared, make_probe(model, packing=False))


@pytest.mark.parametrize("kind", slow_but(LAYERS, "gpt_oss"))
def test_plain_peft_and_merge_give_the_same_model(kind, tmp_path):
    """The saved adapter in plain transformers and peft: logits and gradients; merged: logits."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = on_disk(tmp_path / "base", model=mixture(kind))
    uneven(AutoModelForCausalLM.from_pretrained(base)).save_pretrained(base)
    config = ModelConfig(path=str(base))
    prepared = prepared_model(lora(), config, packing=False)
    mine = trained(prepared.module)
    assert len(grouped(mine)) == LAYERS[kind]
    folder = save_model(prepared, load_tokenizer(config), tmp_path / "adapter")
    assert json.loads(Path(folder, "adapter_config.json").read_text())["target_parameters"]
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder, is_trainable=True)
    require_close(loss_and_gradients(mine), loss_and_gradients(plain), 1e-5)
    wanted = logits(mine)
    torch.testing.assert_close(logits(plain), wanted, atol=1e-5, rtol=1e-5)
    merged = merge(folder, tmp_path / "merged")
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(merged)), wanted, atol=2e-5, rtol=1e-4)
    with mine.disable_adapter():
        torch.testing.assert_close(
            logits(mine), logits(AutoModelForCausalLM.from_pretrained(base)), atol=1e-5, rtol=1e-4
        )


@pytest.mark.parametrize(("kind", "shared"), [("qwen2_moe", "shared_expert"), ("deepseek_v3", "shared_experts")])
def test_shared_experts_have_adapters_and_routers_only_if_named(kind, shared):
    def adapted(**options) -> set[str]:
        model = built(lora(**options), mixture(kind), packing=False)
        return {name.split(".lora_")[0] for name, _ in model.named_parameters() if ".lora_A" in name}

    names = adapted()
    assert not any(name.endswith((".gate", ".router")) for name in names)
    assert {name.rpartition(".")[2] for name in names if f".{shared}." in name} == {
        "gate_proj",
        "up_proj",
        "down_proj",
    }


def test_an_adapter_of_another_number_of_experts_is_one_message(tmp_path):
    base, more = (
        on_disk(tmp_path / str(experts), model=mixture("qwen3_moe", num_experts=experts)) for experts in (4, 8)
    )
    config = ModelConfig(path=str(base))
    adapter = save_model(prepared_model(lora(), config, packing=False), load_tokenizer(config), tmp_path / "adapter")
    message = r"8 weights have another shape, such as .*\(32, 64\) in the file, \(64, 64\) here\).*as many experts\?"
    with pytest.raises(StorageError, match=message):
        built(lora(), ModelConfig(path=str(more), adapter=str(adapter)), packing=False)


def test_a_router_with_nan_is_refused_by_its_name(tmp_path):
    from transformers import AutoModelForCausalLM

    base = on_disk(tmp_path / "base", model=mixture("qwen3_moe"))
    model = AutoModelForCausalLM.from_pretrained(base)
    model.model.layers[1].mlp.gate.weight.data[0, 0] = float("nan")
    model.save_pretrained(base)
    with pytest.raises(StorageError, match=r"NaN or infinite numbers .* model\.layers\.1\.mlp\.gate\.weight"):
        built(lora(), ModelConfig(path=str(base)), packing=False)


@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_moe"])
def test_targets_may_name_the_tensors_of_experts(kind, tmp_path):
    """Then gate and up have rank r together."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    config = ModelConfig(path=str(on_disk(tmp_path / "base", model=mixture(kind))))
    prepared = prepared_model(lora(target_modules=["q_proj", "gate_up_proj", "down_proj"]), config, packing=False)
    mine = trained(prepared.module)
    ranks = {
        module.parameter_name: len(module.lora_A["default"].weight) // 4
        for module in mine.modules()
        if hasattr(module, "parameter_name")
    }
    assert ranks == {"gate_up_proj": 4, "down_proj": 4}
    assert len(grouped(mine)) == 2
    folder = save_model(prepared, load_tokenizer(config), tmp_path / "adapter")
    theirs = logits(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(config.path), folder))
    torch.testing.assert_close(theirs, logits(mine), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("gate_up_projs", r"gate_up_projs is no module of this model. Did you mean gate_up_proj\?"),
        ("gate_proj", r"gate_proj without also targeting up_proj"),
    ],
)
def test_targets_that_name_no_expert(target, message):
    with pytest.raises(ConfigError, match=message):
        built(lora(target_modules=[target]), mixture("qwen3_moe"), packing=False)


def test_experts_beyond_the_memory_are_refused_before_a_weight_is_made():
    sizes = {"hidden_size": 4096, "moe_intermediate_size": 4096, "num_hidden_layers": 100, "num_experts": 512}
    with pytest.raises(ConfigError, match=r"model\.path: its weights in float32, gradients .* this machine has"):
        built(lora(), mixture("qwen3_moe", **sizes), packing=False)


def test_linears_that_peft_reads_as_experts_are_loaded_by_plain_peft_in_a_model_without_experts(tmp_path):
    """peft reads gate_proj, up_proj and down_proj of this family as names of experts, and its dense layers have them."""
    pytest.importorskip("transformers.models.beam")
    from peft.tuners.lora import LoraLayer

    sizes = {**SIZES, "head_dim": 16, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
    config = ModelConfig(path=None, init=Init.random, architecture={"model_type": "beam", **sizes, "n_group": 1})
    prepared = prepared_model(lora(), config, packing=False)
    adapted = sum(isinstance(module, LoraLayer) for module in prepared.module.modules())
    # Its proof loads the adapter with plain peft.
    folder = save_model(trained(prepared), word_tokenizer(100), tmp_path / "adapter")
    assert json.loads(Path(folder, "adapter_config.json").read_text())["target_parameters"]
    assert adapted > 8
