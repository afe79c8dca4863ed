"""Frozen linears in 4 and 8 bits: close to the original weights, exact with the dequantized ones, and never trained."""

from __future__ import annotations

import dataclasses
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.architectures import built, facts_of, logits, lora, on_disk, prepared_model, random_model, trained
from support.cases import slow_but
from support.quantized import KINDS, kinds
from support.runs import losses

from fxtune.cli.merge import merge
from fxtune.distributed.world import World
from fxtune.errors import ConfigError, StorageError
from fxtune.export.save import save_model
from fxtune.facts.options import AdapterInit, Autocast, ComputeDtype, Library, Switch, WeightFormat
from fxtune.facts.run import Facts
from fxtune.models import load as models
from fxtune.models.load import DType, ModelConfig, load_config, load_tokenizer
from fxtune.techniques import quantize
from fxtune.techniques.pipeline import Pipeline, make_probe
from fxtune.techniques.quantize import Quantize
from fxtune.techniques.quantized_modules import dequantized, is_quantized
from fxtune.training import trainer

WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 4}
"""Weights of 16,384 elements and more, as torchao's nf4 needs."""


def qlora(
    kind: str = "nf4", compute: ComputeDtype = ComputeDtype.float32, skip: tuple[str, ...] = (), **options
) -> Pipeline:
    pipeline = lora(**options)
    name, library, double = KINDS[kind]
    pipeline.quantize = Quantize(True, WeightFormat(name), Library(library), double, compute, list(skip))
    return pipeline


@kinds
def test_a_quantized_model_is_close_to_its_base_and_trains_only_adapters(kind):
    model = random_model("llama", **WIDE)
    pipeline, notes = qlora(kind).resolved(facts_of(model))
    assert not [note for note in notes if note.startswith("quantize")], "no option was auto"
    prepared = prepared_model(pipeline, model)
    mine = prepared.module
    evidence = pipeline.prove(prepared, make_probe(mine))
    assert [one.acted for one in evidence if one.technique == "quantize"] == [True] * 3
    assert "14 in " in next(one.observed for one in evidence if one.technique == "quantize")
    assert any("of 378,496 parameters trained" in one.observed for one in evidence), (
        "packed weights count by their logical size"
    )
    assert not is_quantized(mine.get_output_embeddings())
    exact = logits(built(lora(), model))
    lost = ((logits(mine) - exact).norm() / exact.norm()).item()
    assert 0 < lost < (0.3 if "nf4" in kind else 0.03)
    mine.train()
    mine(**make_probe(mine)).logits.logsumexp(-1).sum().backward()
    assert {name for name, parameter in mine.named_parameters() if parameter.grad is not None} == {
        name for name, parameter in mine.named_parameters() if "lora_" in name
    }


@pytest.mark.parametrize("kind", ["nf4", "int8", "int8_torchao"])
def test_gradients_equal_the_dequantized_model_also_after_evaluation_and_generation(kind):
    model = random_model("llama", **WIDE)
    mine, plain = trained(built(qlora(kind), model)), built(lora(), model)
    with torch.no_grad():
        ours = dict(mine.named_modules())
        for name, module in plain.named_modules():
            if is_quantized(ours[name]):
                module.weight.copy_(dequantized(ours[name]))
        adapters = dict(mine.named_parameters())
        for name, parameter in plain.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(adapters[name])
    torch.testing.assert_close(logits(mine), logits(plain), rtol=0, atol=1e-5)
    given = dict(inputs=torch.arange(3, 8).unsqueeze(0), max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert torch.equal(mine.generate(**given), plain.generate(**given))
    gradients = []
    for one in (mine, plain):
        one.train()
        one.zero_grad()
        one(**make_probe(one)).logits.logsumexp(-1).sum().backward()
        gradients.append(
            torch.cat([parameter.grad.flatten() for parameter in one.parameters() if parameter.requires_grad])
        )
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return on_disk(tmp_path_factory.mktemp("quantize") / "base", **WIDE)


@pytest.mark.parametrize(
    ("kind", "options"),
    slow_but(
        [
            ("nf4", {"dora": True}),
            ("int8", {"dora": True}),
            ("nf4_torchao", {"modules_to_save": ["lm_head"]}),
            ("int8_torchao", {}),
        ],
        ("nf4", {"dora": True}),
        ("int8_torchao", {}),
    ),
)
def test_the_adapter_loads_and_merges_onto_the_plain_base(kind, options, base, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = ModelConfig(path=str(base))
    prepared = prepared_model(qlora(kind, **options), model)
    mine = trained(prepared.module)
    adapter = save_model(prepared, load_tokenizer(model), tmp_path / "adapter")
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter)
    weights = {name: parameter for name, parameter in theirs.named_parameters() if "lora_" in name}
    ours = dict(mine.named_parameters())
    assert weights
    assert all(torch.equal(parameter, ours[name]) for name, parameter in weights.items())
    assert (logits(theirs) - logits(mine)).norm() < 0.4 * logits(mine).norm()
    merged = AutoModelForCausalLM.from_pretrained(merge(adapter, tmp_path / "merged"), dtype="auto")
    torch.testing.assert_close(logits(merged), logits(theirs), rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nf4", "int8_torchao"])
def test_a_resumed_quantized_run_ends_with_the_same_bits(kind, narrow, cwd, monkeypatch):
    narrow.techniques.quantize = qlora(kind).quantize
    narrow.techniques.quantize.compute_dtype = ComputeDtype.auto
    narrow.techniques.precision.autocast = Autocast.bfloat16
    narrow.data.packing, narrow.checkpoint.every, narrow.run.dir = True, 2, "whole"
    narrow.train.max_steps, narrow.train.global_batch_size, narrow.train.micro_batch_size = 5, 2, 1
    trainer.run(narrow)
    real, seen = trainer.Trainer.step, []

    def dying(self, step, lr):
        seen.append(step.index)
        if len(seen) == 4:
            raise KeyboardInterrupt
        return real(self, step, lr)

    monkeypatch.setattr(trainer.Trainer, "step", dying)
    narrow.run.dir = "broken"
    with pytest.raises(KeyboardInterrupt):
        trainer.run(narrow)
    trainer.run(narrow)
    assert seen == [0, 1, 2, 3, 2, 3, 4]
    assert losses(Path("broken")) == losses(Path("whole"))
    whole, broken = (load_file(f"{run}/adapter/adapter_model.safetensors") for run in ("whole", "broken"))
    assert all(torch.equal(whole[name], broken[name]) for name in whole)


def test_auto_is_resolved_by_the_installed_packages():
    model = random_model("llama", **WIDE)
    given = qlora(compute=ComputeDtype.auto)
    given.quantize.library, given.precision.autocast = Library.auto, Autocast.bfloat16
    chosen, notes = given.resolved(facts_of(model))
    assert (chosen.quantize.library, chosen.quantize.compute_dtype) == (Library.bitsandbytes, ComputeDtype.bfloat16)
    assert "quantize: bitsandbytes stores the nf4 weights; matmuls run in bfloat16 like the rest of the model" in notes
    without = {name: version for name, version in facts_of(model).packages.items() if name != "bitsandbytes"}
    chosen, _ = given.resolved(facts_of(model, packages=without))
    assert chosen.quantize.library is Library.torchao


def test_skipped_linears_and_the_head_are_not_quantized():
    mine = built(qlora(skip=("down_proj", "layers.0.self_attn.q_proj")), random_model("llama"))
    left = [
        name
        for name, module in mine.named_modules()
        if isinstance(module, torch.nn.Linear) and not is_quantized(module) and "lora_" not in name
    ]
    assert [name.removeprefix("base_model.model.").removesuffix(".base_layer") for name in left] == [
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.mlp.down_proj",
        "model.layers.1.mlp.down_proj",
        "lm_head",
    ]


T4 = dict(device="cuda", device_name="Tesla T4", capability=(7, 5))
H200 = dict(device="cuda", device_name="NVIDIA H200", capability=(9, 0), dtype="bfloat16")


def refused(
    family: str = "llama", facts: dict | None = None, sizes: dict | None = None, full: bool = False, **options
) -> str:
    here = options.pop("here", {})
    pipeline = qlora(**options)
    for name, value in here.items():
        setattr(pipeline.quantize, name, value)
    pipeline.lora.enabled = not full
    known = facts_of(random_model(family, **(sizes or {})), **(facts or {}))
    return "\n".join(pipeline.quantize.check(dataclasses.replace(known, techniques=pipeline)))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"full": True},
            "enabled: weights in nf4 cannot be trained, only adapters over them. Set techniques.lora.enabled=true",
        ),
        (
            {"facts": {"packages": {}}},
            "library: bitsandbytes is not installed. Install it: pip install 'fxtune[quant]'",
        ),
        (
            {"facts": {"packages": {}}, "here": {"library": Library.auto}},
            "library: neither bitsandbytes nor torchao is installed",
        ),
        ({"kind": "nf4_torchao", "here": {"double": False}}, "double: torchao's nf4 always"),
        ({"kind": "int8", "here": {"double": False}}, "double: only nf4's scales can be quantized, and type is int8"),
        (
            {"here": {"transpose": Switch.on}},
            "transpose: only fp8 keeps one, and type is nf4. Set it",
        ),
        (
            {"kind": "nf4_torchao"},
            "library: torchao's nf4 needs weights of a multiple of 16,384 elements, and 14 are not, such as "
            "model.layers.0.self_attn.q_proj",
        ),
        (
            {"kind": "int8", "facts": {**T4, "capability": (7, 0)}},
            "type: int8 needs compute capability 7.5, and Tesla T4 has 7.0.",
        ),
        ({"facts": {**T4, "capability": (5, 2)}}, "type: nf4 needs compute capability 6.0"),
        ({"facts": T4, "compute": ComputeDtype.bfloat16}, "compute_dtype: Tesla T4 has no bfloat16 units"),
        ({"facts": H200, "compute": ComputeDtype.float16}, "compute_dtype: float16 needs loss scaling"),
        (
            {"init": AdapterInit.pissa},
            "enabled: techniques.lora.init=pissa moves a part of the weights into the adapter",
        ),
        ({"init": AdapterInit.olora}, "enabled: techniques.lora.init=olora"),
        ({"kind": "int8_torchao", "dora": True}, "library: techniques.lora.dora=true"),
        ({"modules_to_save": ["down_proj"]}, "skip: techniques.lora.modules_to_save trains down_proj"),
        ({"skip": ("down_prj",)}, "skip: this model has no linear down_prj. Its linears are down_proj, gate_proj"),
        (
            {"skip": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")},
            "enabled: 0 % of this model's",
        ),
        (
            {"facts": {**H200, "free_memory": 60_000}},
            "enabled: the quantized model takes 0.0 GiB, and the card has 0.0 GiB free",
        ),
        (
            {"facts": {**H200, "free_memory": 110_000, "host_memory": 110_000}, "dora": True},
            "enabled: before quantization the model takes",
        ),
    ],
)
def test_check_refuses_with_what_to_change(options, reason):
    assert reason in refused(**options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kind": "int8"},
        {"facts": H200},
        {"facts": T4, "kind": "int8"},
        {"kind": "nf4_torchao", "sizes": WIDE},
        {"facts": {**T4, "dtype": "float16"}, "compute": ComputeDtype.float16},
        {"dora": True},
        {"kind": "int8", "dora": True},
        {"modules_to_save": ["lm_head", "norm"]},
        {"modules_to_save": ["down_proj"], "skip": ("down_proj",)},
        {"facts": {**H200, "free_memory": 110_000, "host_memory": 2**30}, "dora": True},
        {"facts": {**H200, "free_memory": 110_000, "host_memory": 110_000}},
        {"family": "gemma"},
    ],
)
def test_check_accepts_what_can_run(options):
    assert refused(**options) == ""


def test_experts_of_a_mixture_are_refused_by_name():
    model = random_model("llama", model_type="mixtral", num_local_experts=4)
    pipeline = qlora()
    seen = next(iter(pipeline.quantize.verify(prepared_model(pipeline, model), {})))
    assert seen.observed.startswith("8 in nf4/bitsandbytes, 13.0% of the model")


def test_verify_finds_an_unquantized_or_trained_linear():
    pipeline = qlora()
    prepared = prepared_model(pipeline, random_model("llama"))
    mine = prepared.module
    layer = mine.get_base_model().model.layers[1].mlp.up_proj
    layer.base_layer, kept = torch.nn.Linear(64, 96, bias=False).requires_grad_(False), layer.base_layer
    with pytest.raises(ConfigError, match="asked for 14 linears in nf4/bitsandbytes; seen: 13 in nf4/bitsandbytes"):
        pipeline.prove(prepared, make_probe(mine))
    layer.base_layer = kept
    prepared.quantization.error = 0.5
    with pytest.raises(ConfigError, match=r"relative error below 0\.15\); seen: 0\.5000 in the first linear"):
        pipeline.prove(prepared, make_probe(mine))


@pytest.mark.parametrize("pretrained", [True, False])
def test_a_model_larger_than_the_card_is_built_in_host_memory(pretrained, base, monkeypatch):
    """Which device holds the weights before quantization. World is patched to report a card with 1 kB of free memory."""
    model = ModelConfig(path=str(base)) if pretrained else random_model("llama")
    model.dtype = DType.bfloat16
    monkeypatch.setattr(World, "facts", lambda self: Facts(device="cuda", free_memory=1000, host_memory=2**40))
    monkeypatch.setattr(World, "capability", (9, 0))
    made = models.build(model, load_config(model), World(torch.device("cuda", 0)), seed=0, shrinks=True).module
    assert {parameter.device.type for parameter in made.parameters()} == {"cpu"}
    assert {parameter.dtype for parameter in made.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("kind", "pretrained"),
    slow_but([("nf4", True), ("int8", False), ("nf4_torchao", True)], ("nf4", True), ("int8", False)),
)
def test_a_model_that_fits_nowhere_is_quantized_as_it_is_read(kind, pretrained, tmp_path, monkeypatch):
    """The same bits as a model that is read whole, and never more than one matrix in 16 bits beside what is no linear."""
    sizes = {**WIDE, "attention_bias": True}
    model = (
        ModelConfig(path=str(on_disk(tmp_path / "base", **sizes))) if pretrained else random_model("llama", **sizes)
    )
    model.dtype = DType.bfloat16
    pipeline = qlora(kind, ComputeDtype.bfloat16)
    whole = built(pipeline, model)
    monkeypatch.setattr(Pipeline, "_quantizes_rows", lambda *_: True)
    held, most = weakref.WeakSet(), [0]
    real = quantize.quantized

    def watched(linear, *options):
        held.add(linear.weight)
        most[0] = max(most[0], len(held))
        assert not linear.weight.is_meta
        return real(linear, *options)

    monkeypatch.setattr(quantize, "quantized", watched)
    prepared = prepared_model(pipeline, model)
    mine = prepared.module
    assert most == [1]
    assert all(one.acted for one in pipeline.prove(prepared, make_probe(mine)))
    assert torch.equal(logits(mine), logits(whole))
    assert mine.state_dict().keys() == whole.state_dict().keys()


def test_broken_weight_is_found_as_it_is_quantized(tmp_path, monkeypatch):
    folder = on_disk(tmp_path / "base", **WIDE)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    monkeypatch.setattr(Pipeline, "_quantizes_rows", lambda *_: True)
    with pytest.raises(StorageError, match=r"hold NaN .* in model\.layers\.1\.mlp\.up_proj\.weight"):
        built(qlora(), ModelConfig(path=str(folder)))
