"""Weights are read complete or refused, and drawn from the seed. Broken numbers in them: tests/faults/test_weights.py."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.architectures import (
    CPU,
    FAMILIES,
    on_disk,
    random_model,
    tiny_model,
)
from support.mxfp4 import in_mxfp4

from fxtune.config.compose import load as compose
from fxtune.errors import ConfigError, StorageError
from fxtune.models.load import DType, ModelConfig, build, load_config
from fxtune.training.builder import RunBuilder


def load(path, **options):
    model = ModelConfig(path=str(path), **options)
    return build(model, load_config(model), CPU, seed=0).module


def edit(file, change):
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def test_missing_unexpected_and_misshapen_weights_are_refused(copy):
    weights = copy / "model.safetensors"
    edit(weights, lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(StorageError, match=r"not in the files, such as model\.norm\.weight"):
        load(copy)
    edit(
        weights,
        lambda tensors: tensors.update({"model.norm.weight": torch.ones(64), "model.extra.weight": torch.ones(2)}),
    )
    with pytest.raises(StorageError, match=r"no place in the architecture, such as model\.extra\.weight"):
        load(copy)
    edit(
        weights,
        lambda tensors: (tensors.pop("model.extra.weight"), tensors.update({"model.norm.weight": torch.ones(32)})),
    )
    with pytest.raises(
        StorageError, match=r"another shape, such as model\.norm\.weight \(\(32,\) in the file, \(64,\)"
    ):
        load(copy)


def test_tied_weights_are_not_missing(tmp_path):
    folder = on_disk(tmp_path / "tied", tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    loaded = load(folder)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_truncated_file_is_named(copy, keep):
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    with pytest.raises(StorageError, match=r"model\.safetensors is broken or cut short"):
        load(copy)


def test_a_missing_shard_is_named(copy):
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(StorageError, match=r"model-00001-of-00002\.safetensors is missing"):
        load(copy)
    for text in (
        *("{}", "[]", "null", "3", "", '{"weight_map": {}}'),
        *('{"weight_map": null}', '{"weight_map": {"a": ["b.safetensors"]}}'),
    ):
        (copy / "model.safetensors.index.json").write_text(text)
        with pytest.raises(StorageError, match="not a safetensors index"):
            load(copy)


def test_missing_kernel_package_is_named(copy):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "attn_implementation": "flash_attention_2"}))
    with pytest.raises(StorageError, match=r"cannot be loaded as its config\.json says: ImportError: FlashAttention2"):
        load(copy)


def test_pickled_weights_are_refused_unread(copy):
    (copy / "model.safetensors").unlink()
    (copy / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch /tmp/owned'\ntR.")
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin.*safetensors only"):
        load(copy)


@pytest.mark.parametrize("family", FAMILIES)
def test_random_weights_depend_on_seed_and_have_configured_dtype(family):
    model = random_model(family)
    first, again, other = (build(model, load_config(model), CPU, seed).module.state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)
    model.dtype = DType.bfloat16
    half = build(model, load_config(model), CPU, 0).module
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    frequencies = {name: buffer for name, buffer in half.named_buffers() if "inv_freq" in name}
    assert frequencies
    for buffer in frequencies.values():  # rounded to bfloat16 they would shift every position beyond a few hundred
        assert buffer.dtype is torch.float32
        assert not torch.equal(buffer, buffer.bfloat16().float())


def test_building_keeps_global_random_state():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    build(random_model("llama"), load_config(random_model("llama")), CPU, seed=0)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("dtype", [DType.float32, DType.bfloat16])
def test_experts_in_mxfp4_are_unpacked_to_the_same_numbers(dtype, tmp_path):
    folder = on_disk(tmp_path / "base", model=tiny_model("gpt_oss"))
    meant = in_mxfp4(folder)
    source = ModelConfig(path=str(folder), dtype=dtype)
    prepared = build(source, load_config(source), CPU, seed=0)
    model = prepared.module
    assert len(meant) == 4
    for name, wanted in meant.items():
        found = model.get_parameter(name)
        assert found.dtype is getattr(torch, dtype.value)
        assert torch.equal(found.float(), wanted), name
    assert not prepared.config_edited
    assert not hasattr(model.config, "quantization_config")
    model(input_ids=torch.arange(2, 20).unsqueeze(0)).logits.sum().backward()
    assert model.get_parameter(next(iter(meant))).grad.abs().sum() > 0


def test_a_line_says_that_experts_are_unpacked_and_the_forecast_counts_them_so(tmp_path):
    folder = on_disk(tmp_path / "base", model=tiny_model("gpt_oss"))
    words = ["model.dtype=bfloat16", "data.sequence_length=64", "run.device=cpu", "techniques=lora"]
    plain = RunBuilder(compose([f"model.path={folder}", *words]))
    in_mxfp4(folder)
    packed = RunBuilder(compose([f"model.path={folder}", *words]))
    line = "model: its experts are stored in MXFP4 and unpacked to bfloat16 as they are read, the same numbers"
    assert set(packed.notes) - set(plain.notes) == {line}
    assert packed.techniques.memory_need(packed.facts) == plain.techniques.memory_need(plain.facts)


def test_other_models_in_mxfp4_are_refused(copy):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))
    with pytest.raises(ConfigError, match="quantized already"):
        load(copy)
