"""Folders of strangers: files that are more than data are refused. Whole models and adapters: tests/faults/test_security.py."""

from __future__ import annotations

import json
import os

import pytest

from fxtune.errors import ConfigError, StorageError
from fxtune.models.untrusted import MAX_LAYERS, inspect_config, inspect_folder


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_hidden_layers": MAX_LAYERS + 1}, "num_hidden_layers=2001 is beyond"),
        ({"text_config": {"hidden_size": -(2**40)}}, r"text_config\.hidden_size=-1099511627776 is beyond"),
        ({"attn_implementation": "org/kernel"}, "compiled code of the hub"),
        ({"transformers_weights": "../x.safetensors"}, "no safetensors file of this folder"),
    ],
)
def test_config_values_that_no_model_has_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        inspect_config(values, "model.architecture")


def test_usual_config_values_pass():
    inspect_config(
        {"num_hidden_layers": 80, "rope_theta": 1e12, "base": 10**12, "attn_implementation": "sdpa"}, "here"
    )


@pytest.mark.parametrize(
    ("file", "values", "message"),
    [
        ("adapter_config.json", {"init_lora_weights": "eva"}, "reads other files"),
        ("adapter_config.json", {"r": 10**6}, "is no rank"),
        ("adapter_config.json", {"revision": 3}, "is no text"),
        ("adapter_config.json", {"layer_replication": [[0, 2]]}, "builds another model"),
        ("model.safetensors.index.json", {"weight_map": {"a": "../b.safetensors"}}, "only safetensors files"),
        ("tokenizer_config.json", {"chat_template": [{"name": "../x", "template": ""}]}, "a name has letters"),
    ],
)
def test_json_that_is_more_than_data_is_refused(tmp_path, file, values, message):
    (tmp_path / file).write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=message):
        inspect_folder(tmp_path, "model.path=mine")


def test_deep_json_is_refused_and_broken_json_is_left_to_its_reader(tmp_path):
    (tmp_path / "config.json").write_text("[" * 5000 + "]" * 5000)
    with pytest.raises(ConfigError, match="nested more than"):
        inspect_folder(tmp_path, "here")
    (tmp_path / "config.json").write_text("{")
    inspect_folder(tmp_path, "here")


def test_link_out_of_the_folder_is_refused_except_into_the_hub_cache(tmp_path):
    (tmp_path / "secret.json").write_text("{}")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").symlink_to(tmp_path / "secret.json")
    with pytest.raises(ConfigError, match="out of the model's folder"):
        inspect_folder(folder, "here")
    snapshot, blobs = tmp_path / "hub" / "snapshots" / "c0ffee", tmp_path / "hub" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "1").write_text("{}")
    (snapshot / "config.json").symlink_to(blobs / "1")
    inspect_folder(snapshot, "here")
    (blobs / "1").unlink()
    with pytest.raises(StorageError, match="does not exist"):
        inspect_folder(snapshot, "here")


def test_pipe_in_place_of_a_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ConfigError, match="no regular file"):
        inspect_folder(tmp_path, "here")
