"""Liger's kernels: which modules get them, with which arguments, and when they are chosen or refused.

Triton's kernels need a GPU (tests/gpu/test_liger.py). Here plain functions with the same signatures replace them, so a model
with them must equal the plain model; each is recorded by the profiler under its kernel's name. RoPE is fxtune's own and runs
here (tests/kernels/test_rotary.py).
"""

from __future__ import annotations

import re

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
    random_model,
    trained,
)
from support.cases import slow_but
from support.liger import (
    EVERY,
    GPU,
    all_on,
    architecture,
    operations,
    resolved,
    with_liger,
)

from fxtune.errors import ConfigError
from fxtune.export.save import save_model
from fxtune.facts.run import Facts
from fxtune.models.load import Init, ModelConfig, load_config, load_tokenizer
from fxtune.models.prepared import PreparedModel
from fxtune.techniques.assemble import assemble
from fxtune.techniques.liger import technique
from fxtune.techniques.liger.modules import operation_of
from fxtune.techniques.liger.technique import Liger
from fxtune.techniques.pipeline import Pipeline, make_probe

COUNTS = {  # for two layers: norms, RoPE, gated products
    "llama": (5, 2, 2),
    "qwen3": (9, 2, 2),
    "mistral": (5, 2, 2),
    "mistral_sliding": (5, 2, 2),
    "gemma": (5, 2, 2),
    "gemma2": (9, 2, 2),
    "gemma3": (13, 2, 2),
    "phi": (3, 2, 0),
    "phi3": (5, 2, 2),
    "granite": (5, 2, 2),
    "smollm3": (5, 2, 2),
    "qwen2": (5, 2, 2),
    "olmo2": (9, 2, 2),
    "olmo3": (9, 2, 2),
    "ministral": (5, 2, 2),
    "starcoder2": (5, 2, 0),
    "phi_qk": (7, 2, 0),
    "phi3_partial": (5, 2, 2),
    "mistral_gelu": (5, 2, 2),
}


def run(model):
    """Loss and gradients of a packed row."""
    probe = make_probe(model)
    model.zero_grad()
    loss = model(**probe).logits.float().logsumexp(-1).sum()
    loss.backward()
    return loss.detach(), {
        name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
    }


@pytest.mark.parametrize("family", slow_but(EVERY, "llama", "gemma3", "phi", "olmo2", "phi3_partial"))
def test_a_model_with_all_kernels_equals_the_plain_model(family, stand_ins):
    model = architecture(family)
    plain = built(Pipeline(), model)
    mine, pipeline = with_liger(model)
    with torch.no_grad():  # weights other than 1, so that a wrong offset shows
        for result, expected in zip(plain.parameters(), mine.parameters(), strict=True):
            expected.copy_(
                result.add_(0.1 * torch.randn(result.shape, generator=torch.Generator().manual_seed(result.numel())))
            )
    assert list(mine.state_dict()) == list(plain.state_dict())
    (expected, theirs), (loss, ours) = run(plain), run(mine)
    torch.testing.assert_close(loss, expected)
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-5)
    evidence = list(pipeline.liger.verify(PreparedModel(mine), make_probe(mine)))
    assert all(observation.acted for observation in evidence), evidence
    assert [observation.asked.split(":")[0] for observation in evidence] == operations(model)
    norms, turns, gated = COUNTS[family]
    wanted = {"rms_norm": norms, "layer_norm": norms, "rope": turns, "swiglu": gated, "geglu": gated}
    for observation in evidence:
        name = observation.asked.split(":")[0]
        ran = turns - 1 if (family, name) == ("smollm3", "rope") else wanted[name]
        assert observation.observed == f"{wanted[name]} replaced, {ran} runs"


@pytest.mark.parametrize("name", ["rms_norm", "rope", "swiglu"])
def test_only_the_named_kernel_runs(name, stand_ins):
    model, pipeline = with_liger(random_model("llama"), [name])
    (evidence,) = pipeline.liger.verify(PreparedModel(model), make_probe(model))
    assert evidence.acted
    assert {operation_of(module) for module in model.modules()} == {None, name}


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "phi3"])
def test_adapters_and_checkpointing_wrap_liger_and_the_adapter_fits_the_plain_base(family, stand_ins, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = on_disk(tmp_path / "base", family)
    model = ModelConfig(path=str(base))
    pipeline = lora(modules_to_save=["norm"])
    pipeline.checkpointing.enabled = True
    pipeline.liger = all_on(model)
    prepared = assemble(pipeline, model, load_config(model), CPU, 0)
    mine = prepared.module
    evidence = pipeline.prove(prepared, make_probe(mine))
    assert {observation.technique for observation in evidence} >= {"liger", "lora", "checkpointing"}
    assert "liger" not in "".join(name for name, _ in mine.named_parameters())
    expected = logits(trained(mine))
    adapter = save_model(prepared, load_tokenizer(model), tmp_path / "adapter")
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    torch.testing.assert_close(logits(PeftModel.from_pretrained(plain, adapter)), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["rms_norm", "swiglu", "rope"])
def test_norms_and_products_are_left_to_the_compiler(name):
    facts = facts_of(random_model("llama"), **GPU, techniques=enable(compile={}))
    reasons = list(Liger(enabled=True, kernels=[name]).check(facts))
    assert [reason.split(":")[1].strip() for reason in reasons] == ([] if name == "rope" else [name])


def test_verify_finds_a_kernel_that_did_not_run(stand_ins):
    model, pipeline = with_liger(random_model("llama"))
    layer, plain = model.model.layers[0], built(Pipeline(), random_model("llama"))
    layer.mlp = plain.model.layers[0].mlp
    layer.self_attn.forward = type(layer.self_attn).__mro__[1].forward.__get__(layer.self_attn)
    with pytest.raises(ConfigError) as caught:
        pipeline.prove(PreparedModel(model), make_probe(model))
    for part in (
        "swiglu: 2 replaced, 2 runs in a forward pass; seen: 1 replaced, 1 runs",
        "rope: 2 replaced, 2 runs of fxtune::rotary in a forward pass; seen: 2 replaced, 1 runs",
    ):
        assert part in str(caught.value)
    assert "rms_norm" not in str(caught.value)


def test_arguments_equal_liger_s_own_patches():
    """Liger's per-model functions, applied to its own copies of the norms: with the same offset, rounding and in_place."""
    import inspect

    from liger_kernel.transformers import monkey_patch
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    ours = {
        name: family
        for name, family in technique.FAMILIES.items()
        if not family.layer_norm and not name.startswith("olmo")
    }
    assert ours.keys() <= MODEL_TYPE_TO_APPLY_LIGER_FN.keys()
    default = inspect.signature(monkey_patch._patch_rms_norm_module).parameters
    for name, family in ours.items():
        source = inspect.getsource(MODEL_TYPE_TO_APPLY_LIGER_FN[name])
        gemma = "offset=1.0" in source
        assert family.offset == (1.0 if gemma else default["offset"].default), name
        assert family.casting == ("gemma" if gemma else default["casting_mode"].default), name
        assert family.in_place == ("in_place=False" not in source), name


@pytest.mark.parametrize(
    ("model", "options", "known", "reason"),
    [
        ({"model_type": "mamba"}, {}, GPU, "kernels: Liger's are known for gemma, .*and this is mamba"),
        ({**FAMILIES["llama"]}, {"kernels": ["geglu"]}, GPU, "kernels: geglu: this model's config has no GeGLU"),
        (
            {**FAMILIES["llama"]},
            {"kernels": ["layer_norm"]},
            GPU,
            "kernels: layer_norm: this model's config has no LayerNorm",
        ),
        ({**FAMILIES["phi"]}, {"kernels": ["swiglu"]}, GPU, "kernels: swiglu: this model's config has no SwiGLU"),
        (
            {**FAMILIES["mistral"], "hidden_act": "gelu"},
            {"kernels": ["geglu"]},
            GPU,
            "kernels: geglu: this model's config has no GeGLU",
        ),
        (
            {**FAMILIES["llama"]},
            {"kernels": ["rms_norm"]},
            {},
            "kernels: rms_norm: Liger's kernels are written in Triton and need a GPU",
        ),
        (
            {**FAMILIES["llama"]},
            {},
            {**GPU, "packages": {}},
            "kernels: the package liger-kernel is not installed: pip install",
        ),
    ],
)
def test_check_refuses_with_what_to_change(model, options, known, reason):
    liger = Liger(enabled=True, **options)
    reasons = list(
        liger.check(
            facts_of(ModelConfig(path=None, init=Init.random, architecture=model), **known)
            if model["model_type"] != "mamba"
            else Facts(model=model, **known)
        )
    )
    assert len(reasons) == 1
    assert re.search(reason, reasons[0]), reasons[0]


def test_rope_needs_no_gpu_and_no_package():
    liger = Liger(enabled=True, kernels=["rope"])
    assert not list(liger.check(facts_of(random_model("llama"), packages={})))
    assert not list(
        liger.check(facts_of(random_model("llama"), **{**GPU, "packages": {}, "techniques": enable(compile={})}))
    )


def test_the_loss_alone_needs_no_gpu_no_package_and_no_known_model():
    liger = Liger(enabled=True, kernels=["fused_linear_cross_entropy"])
    assert not list(liger.check(Facts(model={"model_type": "mamba"})))
    assert not list(Liger(enabled=True).check(facts_of(random_model("llama"), packages={})))


def test_auto_leaves_a_rope_that_cannot_be_replaced(monkeypatch):
    monkeypatch.setattr("fxtune.upstream.transformers.ROPE", "renamed")
    liger, note = resolved(GPU)
    assert not liger.runs("rope")
    assert "rope off (LlamaAttention calls no renamed" in note
    demanded = Liger(enabled=True, kernels=["rope"])
    assert next(demanded.check(facts_of(random_model("llama")))).startswith("kernels: rope: LlamaAttention")


def test_auto_is_on_for_the_model_s_operations_on_a_gpu_and_off_on_a_cpu():
    on = {family: {*resolved(GPU, family)[0].kernels} for family in ("llama", "gemma3", "phi", "phi3")}
    assert on == {
        "llama": {"rms_norm", "rope", "swiglu"},
        "gemma3": {"rms_norm", "rope", "geglu"},
        "phi": {"layer_norm", "rope"},
        "phi3": {"rms_norm", "rope", "swiglu"},
    }
    chosen, note = resolved({})
    assert chosen.kernels == []
    assert "rms_norm off (Triton needs a GPU)" in note
    assert note.startswith("no kernel runs here: ")
    assert not resolved({"sequence_length": 2**18})[1].startswith("no kernel"), "the loss is fused without a GPU, too"
    assert not resolved(GPU)[1].startswith("no kernel")
    assert resolved(GPU, kernels=[])[1] == "no kernel runs here: kernels is empty"
    assert "geglu" not in note, "operations that the model does not have are not reported"


def test_auto_fuses_the_loss_if_logits_are_large():
    chosen, note = resolved({"sequence_length": 65536, "micro_batch_size": 2})
    assert not chosen.runs("fused_linear_cross_entropy")
    assert "logits are up to 0.062 GiB" in note
    chosen, _ = resolved({"rows": (512, 131072), "micro_batch_size": 2})
    assert chosen.runs("fused_linear_cross_entropy")


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3", "olmo2", "gemma3", "phi", "phi_qk"])
def test_under_compile_rope_is_off_if_norms_precede_it(family, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    normed = any(
        name.endswith(("q_norm", "q_layernorm")) for name, _ in built(Pipeline(), architecture(family)).named_modules()
    )
    chosen, note = resolved({**GPU, "techniques": enable(compile={})}, family)
    assert chosen.runs("rope") != normed, note
    assert resolved(GPU, family)[0].runs("rope")


def test_the_pipeline_reports_liger_s_choice():
    pipeline = Pipeline()
    pipeline.liger = Liger(enabled=True)
    chosen, notes = pipeline.resolved(facts_of(random_model("llama")))
    assert any(note.startswith("liger: no kernel runs here: rms_norm off (Triton needs a GPU), ") for note in notes)
    assert pipeline.liger.kernels == "auto", "resolving changes a copy"
    assert chosen.liger.kernels == []
