"""A saved model or adapter is complete, replaces the old one, and loads elsewhere."""

from __future__ import annotations

import json

import pytest
import torch
from support.architectures import (
    CPU,
    logits,
    lora,
    prepared_model,
    trained,
)
from support.disks import files_of_at_most

from fxtune.errors import StorageError
from fxtune.export.save import save_model
from fxtune.models.load import ModelConfig, build, load_config, load_tokenizer
from fxtune.models.proof import changed_since
from fxtune.techniques.pipeline import Pipeline


def load(path, **options):
    model = ModelConfig(path=str(path), **options)
    return build(model, load_config(model), CPU, seed=0)


def test_saved_model_loads_in_plain_transformers(base, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = trained(load(base))
    folder = save_model(model, load_tokenizer(ModelConfig(path=str(base))), tmp_path / "out")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(folder)), logits(model.module))
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == AutoTokenizer.from_pretrained(base).get_vocab()
    assert not list(tmp_path.glob(".*")), "nothing staged is left"


def test_saving_replaces_and_full_disk_keeps_the_old_folder(base, tmp_path, monkeypatch):
    tokenizer = load_tokenizer(ModelConfig(path=str(base)))
    tokenizer.eos_token = "t0"  # a changed tokenizer is written by its library
    model = load(base)
    save_model(model, tokenizer, tmp_path / "out")
    before = (tmp_path / "out" / "model.safetensors").read_bytes()

    def full(*_, **__):
        raise Exception("No space left on device (os error 28)")  # as tokenizers does

    monkeypatch.setattr(tokenizer, "save_pretrained", full)
    with pytest.raises(StorageError, match="No space left"):
        save_model(trained(model), tokenizer, tmp_path / "out")
    monkeypatch.undo()
    # The weights themselves do not fit: another library's error.
    with files_of_at_most(10_000), pytest.raises(StorageError, match="File too large"):
        save_model(model, tokenizer, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before
    save_model(model, tokenizer, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() != before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_old_export_comes_back_after_a_kill_between_the_two_renames(base, tmp_path, monkeypatch):
    tokenizer = load_tokenizer(ModelConfig(path=str(base)))
    tokenizer.eos_token = "t0"
    save_model(load(base), tokenizer, tmp_path / "out")
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    (tmp_path / "out").rename(tmp_path / ".out.old")

    def full(*_, **__):
        raise OSError("No space left on device")

    monkeypatch.setattr(tokenizer, "save_pretrained", full)
    with pytest.raises(StorageError, match="No space left"):
        save_model(load(base), tokenizer, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_named_chat_templates_are_saved_readable_and_proven(base, tmp_path):
    from transformers import AutoTokenizer

    tokenizer = load_tokenizer(ModelConfig(path=str(base)))
    tokenizer.chat_template = {"default": "{{ messages[0].content }}", "tool_use": "{{ messages[1].content }}"}
    folder = save_model(load(base), tokenizer, tmp_path / "out")
    assert AutoTokenizer.from_pretrained(folder).chat_template == tokenizer.chat_template
    assert changed_since(folder)[1] == []
    file = folder / "additional_chat_templates" / "tool_use.jinja"
    file.write_text(file.read_text() + " ")
    (changed,) = changed_since(folder)[1]
    assert "tool_use.jinja has" in changed


def test_adapter_has_config_only_if_base_config_was_edited(base, tmp_path):
    model = ModelConfig(path=str(base))
    adapter = save_model(prepared_model(lora(), model), load_tokenizer(model), tmp_path / "adapter")
    assert sorted(path.name for path in adapter.iterdir()) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
        "proof.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base.resolve())
    assert Pipeline().lora.enabled is False


def test_target_modules_are_sorted(base, tmp_path):
    adapter = save_model(
        prepared_model(lora(), ModelConfig(path=str(base))),
        load_tokenizer(ModelConfig(path=str(base))),
        tmp_path / "adapter",
    )
    modules = json.loads((adapter / "adapter_config.json").read_text())["target_modules"]
    assert len(modules) > 1
    assert modules == sorted(modules)
