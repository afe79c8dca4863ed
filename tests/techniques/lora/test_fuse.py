"""Fused adapters have the losses, gradients, names and files of plain peft."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from support.architectures import built, facts_of, logits, lora, on_disk, prepared_model, random_model, trained
from support.cases import slow_but
from support.decoder_sizes import decoder_sizes
from support.lora_models import (
    EVERY,
    OPERATORS,
    lora_pair,
    loss_and_gradients,
    prepared_pair,
    quantized_in,
    require_close,
)
from support.model_table import small_models

from fxtune.errors import ConfigError
from fxtune.export.save import save_model
from fxtune.facts.options import Autocast, Switch, WeightFormat
from fxtune.models.load import DType, Init, ModelConfig, load_tokenizer
from fxtune.models.structure import decoder_layers, parameter_counts
from fxtune.techniques.lora import fuse
from fxtune.techniques.pipeline import make_probe
from fxtune.tracking.throughput import training_cost


@pytest.mark.parametrize("family", slow_but(OPERATORS, "llama", "qwen2", "gemma3", "phi", "phi3"))
def test_fused_matches_peft_in_losses_gradients_and_names(family):
    pair = prepared_pair(random_model(family))
    plain, fused = (prepared.module for prepared in pair)
    assert dict(pair[1].fusion.operators) == OPERATORS[family]
    assert not pair[1].fusion.left
    require_close(loss_and_gradients(fused), loss_and_gradients(plain), 1e-5)
    theirs, mine = plain.state_dict(), fused.state_dict()
    assert list(theirs) == list(mine)
    assert all(torch.equal(value, mine[name]) for name, value in theirs.items())


@pytest.mark.parametrize(
    "kind", slow_but(["qwen3_5_text", "olmo_hybrid", "kimi_linear"], "qwen3_5_text", "olmo_hybrid")
)
def test_fused_layers_of_hybrids_keep_packed_documents_apart(kind):
    architecture = small_models.small(kind)
    plain, fused = prepared_pair(ModelConfig(path=None, init=Init.random, architecture=architecture))
    layers = len(decoder_layers(fused.module))
    assert fused.fusion.operators["attention"] == layers - (kind == "kimi_linear")
    require_close(loss_and_gradients(fused.module), loss_and_gradients(plain.module), 1e-4)


@pytest.mark.parametrize(
    ("options", "groups"),
    [
        ({"target_modules": ["q_proj", "v_proj"]}, {"attention": 2}),
        ({"target_modules": ["q_proj"]}, {"linear": 2}),
        ({"target_modules": ["gate_proj", "down_proj", "k_proj", "v_proj"]}, {"attention": 2, "linear": 4}),
        ({"rslora": True}, EVERY),
        ({"r": 17, "alpha": 3.0}, EVERY),
        ({"modules_to_save": ["norm"]}, EVERY),
        ({"target_modules": ["o_proj", "lm_head"]}, {"linear": 3}),
    ],
)
def test_subsets_of_linears_and_other_scalings_match_peft(options, groups):
    pair = prepared_pair(random_model("llama"), **options)
    plain, fused = (prepared.module.double() for prepared in pair)  # rslora's scale costs float32 two digits
    assert dict(pair[1].fusion.operators) == groups
    require_close(loss_and_gradients(fused), loss_and_gradients(plain), 1e-12)


@pytest.mark.filterwarnings("ignore:flex_attention called")
def test_count_operators_works_with_flex_attention():
    """It is an operator that takes a function, which a mode of torch's has to let through."""
    from torch.nn.attention.flex_attention import flex_attention

    q = torch.randn(1, 1, 16, 16)
    assert fuse.count_operators(lambda: flex_attention(q, q, q)) == {}


def test_unfused_modules_are_listed_with_the_reason():
    fused = prepared_model(lora(fused=Switch.on, target_modules=["q_proj", "embed_tokens"]), random_model("llama"))
    assert fused.fusion.describe() == "2 single linears; 1 left to peft: Embedding is no linear"


@pytest.mark.parametrize("base", [DType.bfloat16, DType.float32])
def test_autocast_is_as_accurate_as_peft(base):
    def prepare(pipeline):
        pipeline.precision.autocast = Autocast.bfloat16

    model = random_model("llama")
    exact = loss_and_gradients(lora_pair(model)[0])
    model.dtype = base
    plain, fused = (
        loss_and_gradients(adapted, dtype=torch.bfloat16) for adapted in lora_pair(model, base.value, prepare)
    )

    def off(found):
        return sum((found[1][name].float() - wanted).norm() ** 2 for name, wanted in exact[1].items()) ** 0.5

    assert {gradient.dtype for gradient in fused[1].values()} == {torch.float32}
    assert off(fused) <= 1.5 * off(plain)


@pytest.mark.slow
def test_first_update_over_a_bfloat16_base_acts_as_in_float32(tmp_path):
    """Adam's first step of 1e-4 changes every product by less than half of its last bit: peft adds that to what is rounded
    already, and loses a part of it in each linear. Here it is in one sum with the base.
    """
    path = str(
        on_disk(
            tmp_path,
            dtype=torch.bfloat16,
            **decoder_sizes(256, 768, layers=8, heads=8, key_heads=4, vocabulary=512),
        )
    )
    rows, fell = torch.randint(3, 512, (2, 128), generator=torch.Generator().manual_seed(1)), {}
    runs = {"float32": ("float32", Switch.off), "peft": ("bfloat16", Switch.off), "fused": ("bfloat16", Switch.on)}
    for name, (dtype, fused) in runs.items():
        pipeline = lora(16, fused=fused)
        pipeline.precision.autocast = Autocast.bfloat16 if dtype == "bfloat16" else Autocast.none
        model = built(pipeline, ModelConfig(path=path, dtype=DType(dtype)), dtype=dtype).train()

        def loss(model=model, dtype=dtype):
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
                return model(input_ids=rows, labels=rows, use_cache=False).loss

        (before := loss()).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter -= 1e-4 * parameter.grad.sign()
        fell[name] = (before - loss()).item()
    print(fell)
    assert fell["fused"] == pytest.approx(fell["float32"], rel=0.03)
    assert fell["peft"] < 0.95 * fell["float32"]


@pytest.mark.parametrize("kind", [WeightFormat.nf4, WeightFormat.int8])
def test_quantized_base_matches_peft(kind):
    pair = prepared_pair(random_model("llama"), prepare=quantized_in(kind))
    plain, fused = (prepared.module for prepared in pair)
    assert dict(pair[1].fusion.operators) == EVERY
    require_close(loss_and_gradients(fused), loss_and_gradients(plain), 1e-5)


def test_linears_of_different_dtypes_are_not_grouped():
    model = built(lora(fused=Switch.off), random_model("llama"))
    for layer in decoder_layers(model):
        layer.self_attn.k_proj.get_base_layer().bfloat16()
        layer.mlp.up_proj.get_base_layer().bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        assert dict(fuse.fuse(model).operators) == {"linear": 14}


def test_saved_adapter_loads_in_plain_peft_and_as_a_start(tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = ModelConfig(path=str(on_disk(tmp_path / "base")))
    pair = [prepared_model(lora(fused=Switch.off), model), trained(prepared_model(lora(fused=Switch.on), model))]
    fused, tokenizer = pair[1].module, load_tokenizer(model)
    one, other = (
        save_model(adapted, tokenizer, tmp_path / name) for adapted, name in zip(pair, ("plain", "fused"), strict=True)
    )
    theirs, mine = (load_file(folder / "adapter_model.safetensors") for folder in (one, other))
    assert {name: value.shape for name, value in theirs.items()} == {name: value.shape for name, value in mine.items()}
    assert (one / "adapter_config.json").read_text() == (other / "adapter_config.json").read_text()
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), other)
    torch.testing.assert_close(logits(loaded), logits(fused), rtol=1e-4, atol=1e-5)
    again = built(lora(fused=Switch.on), ModelConfig(path=str(tmp_path / "base"), adapter=str(other)))
    assert torch.equal(logits(again), logits(fused))


def test_flops_and_parameters_are_counted_as_without_fusing():
    plain, fused = lora_pair(random_model("llama"))
    assert training_cost(plain) == training_cost(fused)
    assert sum(parameter_counts(plain).values()) == sum(parameter_counts(fused).values())


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"dropout": 0.1}, "techniques.lora.dropout=0.1"), ({"dora": True}, "techniques.lora.dora=true")],
)
def test_on_is_refused_and_auto_is_off_if_no_adapter_can_be_fused(options, reason):
    card = facts_of(random_model("llama"), device="cuda", capability=(9, 0))
    with pytest.raises(ConfigError, match=rf"techniques\.lora\.fused: {reason}"):
        lora(fused=Switch.on, **options).resolved(card)
    chosen, notes = lora(**options).resolved(card)
    assert chosen.lora.fused is Switch.off
    assert any(reason in note for note in notes)
    fusion = fuse.fuse(built(lora(**options), random_model("llama")))
    assert not fusion.operators
    assert fusion.describe() == f"none; 14 left to peft: {'DoRA' if 'dora' in options else 'dropout'}"


def test_auto_is_on_with_a_gpu_and_takes_precedence_over_liger():
    for device, chosen in (("cuda", Switch.on), ("cpu", Switch.off)):
        pipeline = lora()
        pipeline.liger.enabled = True
        ready, notes = pipeline.resolved(
            facts_of(
                random_model("llama"),
                device=device,
                capability=(9, 0),
                dtype="bfloat16",
                packages={"liger-kernel": "0.8.5"},
            )
        )
        assert ready.lora.fused is chosen
        assert any(note.startswith(f"lora: fused {chosen.value}") for note in notes)
        assert not ready.liger.runs("swiglu")
    pipeline.lora.fused, pipeline.liger.kernels = Switch.on, ["swiglu"]
    with pytest.raises(ConfigError, match=r"techniques\.liger\.kernels: swiglu: techniques\.lora\.fused=on"):
        pipeline.resolved(
            facts_of(random_model("llama"), device="cuda", capability=(9, 0), packages={"liger-kernel": "0.8.5"})
        )
    pipeline.lora.fused = Switch.auto
    ready, _ = pipeline.resolved(
        facts_of(random_model("llama"), device="cuda", capability=(9, 0), packages={"liger-kernel": "0.8.5"})
    )
    assert (ready.lora.fused, ready.liger.kernels) == (Switch.off, ["swiglu"])


def test_missing_operators_are_an_error():
    pipeline = lora(fused=Switch.on)
    prepared = prepared_model(pipeline, random_model("llama"))
    model = prepared.module
    assert all(evidence.acted for evidence in pipeline.verify(prepared, make_probe(model)))
    layer = model.get_base_model().model.layers[0]
    layer.mlp = layer.mlp.replaced
    with pytest.raises(ConfigError, match=r"adapters fused: 6 operators .* fxtune\.lora_mlp 1 times ran"):
        pipeline.prove(prepared, make_probe(model))
