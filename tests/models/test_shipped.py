"""The configs of published models that ship with fxtune: each is the model that it names, and when they are used."""

from __future__ import annotations

import pytest
import torch
from support.decoder_sizes import decoder_sizes
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from fxtune.errors import HubError, StorageError
from fxtune.models import shipped
from fxtune.models.kinds.known import kind_of
from fxtune.models.load import Init, ModelConfig, load_config, load_tokenizer, ships_mxfp4, with_shipped_config
from fxtune.models.shipped import ShippedConfig, config_without_hub, shipped_configs
from fxtune.system.files.hub import GatedError, Origin

FIRST = {entry.ids[0]: entry for entry in shipped_configs().values()}
LLAMA = "meta-llama/Llama-3.1-8B"


@pytest.fixture(autouse=True)
def forgotten():
    config_without_hub.cache_clear()
    yield
    config_without_hub.cache_clear()


@pytest.mark.parametrize("entry", FIRST.values(), ids=list(FIRST))
def test_built_model_has_the_published_number_of_parameters(entry: ShippedConfig):
    config = load_config(with_shipped_config(ModelConfig(path=entry.ids[-1]), plans=True))
    kind_of(config)
    auto = AutoModelForImageTextToText if "vision_config" in entry.config else AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(config)
    model.tie_weights()
    assert sum(weight.numel() for weight in model.parameters()) / 1e9 == pytest.approx(entry.billions, rel=0.01)
    assert entry.source


def test_each_id_has_one_config():
    assert len(shipped_configs()) == sum(len(entry.ids) for entry in FIRST.values()) > 150


def test_training_on_real_weights_still_needs_the_hub():
    with pytest.raises(HubError, match=LLAMA):
        load_config(ModelConfig(path=LLAMA))


def test_random_weights_need_a_config_and_a_tokenizer_but_no_hub(capsys):
    model = ModelConfig(path=LLAMA, init=Init.random, tokenizer="builtin:tiny")
    config = load_config(model)
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (4096, 32, 128256)
    assert load_tokenizer(model, config).eos_token
    assert capsys.readouterr().out.count("ships with fxtune") == 1
    model.architecture = {
        **decoder_sizes(layers=2, hidden=512, heads=4, key_heads=4),
    }
    smaller = load_config(model)
    assert (smaller.num_hidden_layers, smaller.head_dim, smaller.vocab_size) == (2, 128, 128256)
    model.tokenizer = None
    with pytest.raises(HubError, match="builtin:tiny"):
        load_config(model)


def test_files_of_the_hub_win_over_the_shipped_config(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(shipped, "locate", lambda path, revision, key: Origin(tmp_path, path, revision))
    model = ModelConfig(path=LLAMA)
    assert with_shipped_config(model, plans=True) is model
    assert capsys.readouterr().out == ""


def test_a_gated_model_needs_no_token_for_a_plan(monkeypatch, capsys):
    def refuse(path, revision, key):
        raise GatedError(f"{path} is gated")

    monkeypatch.setattr(shipped, "locate", refuse)
    assert load_config(with_shipped_config(ModelConfig(path=LLAMA), plans=True)).num_hidden_layers == 32
    assert "gated" in capsys.readouterr().out


def test_a_plan_knows_that_a_checkpoint_is_quantized_and_random_weights_are_not():
    plan = with_shipped_config(ModelConfig(path="openai/gpt-oss-20b"), plans=True)
    config = load_config(plan)
    assert getattr(config, "quantization_config", None) is None
    assert ships_mxfp4(plan, config)
    model = ModelConfig(path="openai/gpt-oss-20b", init=Init.random, tokenizer="builtin:tiny")
    assert not ships_mxfp4(model, load_config(model))


def test_an_unknown_name_gets_the_nearest_one():
    with pytest.raises(StorageError, match=f"did you mean `{LLAMA}`"):
        with_shipped_config(ModelConfig(path="meta-llama/Llama-3.1-8"), plans=True)
