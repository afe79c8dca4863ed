"""The tokenizer of an export: the base's own files, unless training changed it."""

from __future__ import annotations

import json

import pytest
from support.architectures import on_disk

from fxtune.export.tokenizer import write_tokenizer
from fxtune.models.load import ModelConfig, load_tokenizer


@pytest.fixture
def source(tmp_path):
    """A base whose tokenizer's files are not as transformers 5 would write them, without a pad token."""
    folder = on_disk(tmp_path / "source")
    config = folder / "tokenizer_config.json"
    values = {**json.loads(config.read_text()), "tokenizer_class": "PreTrainedTokenizerFast", "made_by": "its author"}
    config.write_text(json.dumps(values))
    (folder / "special_tokens_map.json").write_text('{ "eos_token":   "t1" }')
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (folder / "tokenizer.json").write_text(json.dumps(json.loads((folder / "tokenizer.json").read_text())) + "\n\n")
    return folder


@pytest.fixture
def out(tmp_path):
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


NAMES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def test_an_unchanged_tokenizer_is_exported_byte_for_byte(source, out):
    tokenizer = load_tokenizer(ModelConfig(path=str(source)))
    assert tokenizer.pad_token is not None
    tokenizer(["two words", "one"], padding=True, truncation=True, max_length=4)  # leaves its lengths behind
    write_tokenizer(tokenizer, out)
    assert sorted(path.name for path in out.iterdir()) == sorted([*NAMES, "chat_template.jinja"])
    for path in out.iterdir():
        assert path.read_bytes() == (source / path.name).read_bytes(), path.name


def test_another_chat_template_changes_no_other_file(source, out):
    config = source / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": "old"}))
    tokenizer = load_tokenizer(ModelConfig(path=str(source)))
    tokenizer.chat_template = "{{ messages }}"
    write_tokenizer(tokenizer, out)
    assert (out / "chat_template.jinja").read_text() == "{{ messages }}"
    assert (out / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert "chat_template" not in json.loads((out / "tokenizer_config.json").read_text())
    assert load_tokenizer(ModelConfig(path=str(source), tokenizer=str(out))).chat_template == "{{ messages }}"


@pytest.mark.parametrize("change", ["token", "eos"])
def test_a_changed_tokenizer_has_names_that_both_versions_read(source, out, change):
    from transformers import AutoTokenizer

    tokenizer = load_tokenizer(ModelConfig(path=str(source)))
    if change == "token":
        tokenizer.add_special_tokens({"additional_special_tokens": ["<new>"]})
    else:
        tokenizer.eos_token = "t2"
    write_tokenizer(tokenizer, out)
    values = json.loads((out / "tokenizer_config.json").read_text())
    assert values["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert not {"backend", "is_local", "extra_special_tokens"} & values.keys()
    read = AutoTokenizer.from_pretrained(out)
    assert (read.get_vocab(), read.eos_token) == (tokenizer.get_vocab(), tokenizer.eos_token)
    assert read.all_special_tokens == tokenizer.all_special_tokens
