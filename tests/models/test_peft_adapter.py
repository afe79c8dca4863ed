"""Training on from an adapter: with other options, of another base, or damaged, it is refused."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.architectures import built, logits, lora, prepared_model, trained

from fxtune.errors import ConfigError, StorageError
from fxtune.export.save import save_model
from fxtune.models.load import ModelConfig, load_tokenizer
from fxtune.techniques.pipeline import make_probe


@pytest.fixture
def adapter(base, tmp_path):
    model = ModelConfig(path=str(base))
    return save_model(trained(prepared_model(lora(), model)), load_tokenizer(model), tmp_path / "adapter")


def test_training_starts_from_an_adapter(base, adapter):
    pipeline = lora()
    source = ModelConfig(path=str(base), adapter=str(adapter))
    prepared, again = (prepared_model(pipeline, source, seed=seed) for seed in (0, 1))
    first, second = prepared.module, again.module
    assert torch.equal(logits(first), logits(second)), "nothing is left of what was drawn"
    assert not torch.equal(logits(first), logits(built(lora(), ModelConfig(path=str(base)))))
    assert all(evidence.acted for evidence in pipeline.verify(prepared, make_probe(first)))
    trained(first)
    assert not torch.equal(logits(first), logits(second))


def test_different_adapter_options_are_refused_key_by_key(base, adapter):
    pipeline = lora(r=8, alpha=16.0, rslora=True)
    with pytest.raises(ConfigError) as caught:
        built(pipeline, ModelConfig(path=str(base), adapter=str(adapter)))
    for line in (
        "techniques.lora.r: 8 in the recipe, 4 in the adapter",
        "techniques.lora.alpha: 16.0 in the recipe, 32.0 in the adapter",
        "techniques.lora.rslora: True in the recipe, False in the adapter",
    ):
        assert line in str(caught.value)
    with pytest.raises(ConfigError, match=r"target_modules: \['q_proj'\] in the recipe"):
        built(lora(target_modules=["q_proj"]), ModelConfig(path=str(base), adapter=str(adapter)))
    pipeline.lora.enabled = False
    with pytest.raises(ConfigError, match=r"techniques\.lora\.enabled=false"):
        built(pipeline, ModelConfig(path=str(base), adapter=str(adapter)))


def test_an_adapter_of_another_rank_is_refused_before_the_base_is_loaded(base, adapter, monkeypatch):
    monkeypatch.setattr("fxtune.models.load.build", lambda *_, **__: pytest.fail("weights were loaded"))
    with pytest.raises(ConfigError) as refused:
        built(lora(r=8), ModelConfig(path=str(base), adapter=str(adapter)))
    message = str(refused.value)
    assert "techniques.lora.r: 8 in the recipe, 4 in the adapter" in message
    assert "for rank 8, fxtune merge" in message


def test_damaged_adapters_and_those_of_another_base_are_refused(base, adapter, tmp_path):
    model = ModelConfig(path=str(base), adapter=str(adapter))
    weights = load_file(adapter / "adapter_model.safetensors")
    name = sorted(weights)[0]
    (adapter / "proof.json").unlink()
    for change, message in (
        ({}, f"weights are missing, such as {name}"),
        ({name: torch.zeros(1, 1)}, "another shape"),
        ({name: weights[name], "base_model.model.x.lora_A.weight": torch.zeros(1)}, "no place"),
    ):
        kept = {key: value for key, value in weights.items() if key != name}
        save_file({**kept, **change}, adapter / "adapter_model.safetensors")
        with pytest.raises(StorageError, match=message):
            built(lora(), model)
    (adapter / "adapter_model.safetensors").write_bytes(b"short")
    with pytest.raises(StorageError, match=r"adapter_model\.safetensors is broken"):
        built(lora(), model)
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(StorageError, match=r"adapter_model\.safetensors is missing"):
        built(lora(), model)
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "IA3"}))
    (adapter / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match="it is a IA3 adapter"):
        built(lora(), model)
    for text in ("{", "[1]"):
        (adapter / "adapter_config.json").write_text(text)
        with pytest.raises(StorageError, match=r"adapter_config\.json"):
            built(lora(), model)
    with pytest.raises(ConfigError, match="no such folder"):
        built(lora(), ModelConfig(path=str(base), adapter=str(tmp_path / "nowhere")))
