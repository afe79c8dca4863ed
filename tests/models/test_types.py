"""Model types whose layers or files have something that no other type has, as scripts/make/model_table.py tries all types."""

from __future__ import annotations

import pytest
import transformers
from support.cases import slow_but
from support.model_table import model_table, small_models

from fxtune.models.load import Init, ModelConfig, load_config

DIFFERENT = {
    "deepseek_v4": "files with other names, three kinds of attention",
    "gemma3n_text": "lists of sizes, shared keys and values",
    "gemma4_text": "heads of two widths, shared keys and values",
    "gpt_oss": "windows, sinks, biases of experts",
    "hunyuan_v1_moe": "a list of experts a token",
    "lfm3": "files with other names, convolutions",
    "llama4_text": "queries scaled by place, experts in every other layer",
    "mimo_v2_flash": "heads of values narrower than heads of keys",
    "nemotron_h": "layers of one part: Mamba, experts, attention, MLP",
    "phimoe": "routers that draw",
}
ALIKE = [
    *("bloom", "cohere2", "deepseek_v3", "gemma2", "gemma3_text", "glm4", "gpt2", "gpt_neox", "granite", "mamba2"),
    *("mixtral", "olmo2", "opt", "phi3", "qwen3", "qwen3_moe", "qwen3_next", "smollm3"),
]
"""Other types, with full attention or without."""


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    return model_table.write_chats(tmp_path_factory.mktemp("chats"))


@pytest.mark.parametrize("kind", slow_but([*DIFFERENT, *ALIKE], "gpt_oss", "nemotron_h"))
def test_each_check_passes(chats, tmp_path, kind):
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip("this transformers is older than the type")
    row = model_table.attempt(kind, chats, tmp_path / "run", whole=False)
    assert row.result == "acts"
    assert {name: why for name, why in row.checks.items() if why} == {}
    assert {*row.checks} == {"verify", "full", "plan", "merge"}


@pytest.mark.parametrize("kind", ["gpt2", "deepseek_v3", "jamba", "laguna", "llama4_text", "qwen3_next"])
def test_a_small_model_has_each_kind_of_layer_that_the_default_model_has(kind):
    architecture, default = small_models.small(kind), transformers.CONFIG_MAPPING[kind]()
    config = load_config(ModelConfig(path=None, init=Init.random, architecture=architecture))
    small = small_models.kinds_of_layers(config)
    assert len(set(small)) >= len(set(small_models.kinds_of_layers(default)))
    assert len(small) <= small_models.MOST_LAYERS
    assert config.tie_word_embeddings == default.tie_word_embeddings
    assert sum(weight.numel() for weight in small_models.random_model(architecture).parameters()) < 2e6


def test_no_tensor_of_a_small_model_is_a_constant():
    model = small_models.random_model(small_models.small("gemma3n_text"))
    tensors = [tensor for tensor in model.parameters() if tensor.numel() > 1]
    assert [tensor for tensor in tensors if (tensor == tensor.flatten()[0]).all()] == []
    assert model.get_input_embeddings().weight.any(-1).all()


def test_a_check_that_fails_is_named_in_the_row(chats, tmp_path, monkeypatch):
    monkeypatch.setattr(model_table, "CLOSE", -1.0)
    row = model_table.attempt("llama", chats, tmp_path / "run", whole=False)
    assert "merge: logits differ by" in str(row)
    refused = model_table.attempt("bert", chats, tmp_path / "run", whole=False)
    assert refused.result.startswith("refused: model.path")
    assert refused.checks == {}
