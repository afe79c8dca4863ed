"""A model that scores documents: which config is one, what it takes from a base, and with what its tokenizer pads."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from support.architectures import CPU, on_disk, random_model, tiny_model, word_tokenizer
from transformers import AutoModelForSequenceClassification

from fxtune.cli.main import main
from fxtune.errors import ConfigError, StorageError
from fxtune.models.kinds.known import kind_of, with_head
from fxtune.models.kinds.scorer import Scorer
from fxtune.models.load import Init, ModelConfig, build, load_config, load_tokenizer
from fxtune.models.structure import output_head, outputs


def test_head_that_is_needed_makes_the_kind():
    config = load_config(random_model("llama"), "score")
    assert isinstance(kind_of(config), Scorer)
    assert (config.architectures, config.num_labels) == (["LlamaForSequenceClassification"], 1)
    assert not isinstance(kind_of(load_config(random_model("llama"))), Scorer)
    with pytest.raises(ConfigError, match=r"LlamaForSequenceClassification.*no log-probabilities of tokens"):
        with_head(config, "lm")


def test_base_gives_the_body_and_the_seed_gives_the_head(tmp_path):
    base = ModelConfig(path=str(on_disk(tmp_path / "base")))
    config = load_config(base, "score")
    one, again, other = (build(base, config, CPU, seed).module for seed in (3, 3, 4))
    head = output_head(one).weight
    assert head.shape == (1, 64)
    assert 0.01 < head.std() < 0.04
    assert torch.equal(head, output_head(again).weight)
    assert not torch.equal(head, output_head(other).weight)
    stored = load_file(tmp_path / "base/model.safetensors")
    assert torch.equal(one.model.embed_tokens.weight, stored["model.embed_tokens.weight"])
    row = kind_of(config).small_row(one, 5)
    with torch.no_grad():
        assert torch.equal(outputs(one, **row)[:, -1], one(**row).logits)


def test_whole_reward_model_is_read_as_it_is(tmp_path):
    base = ModelConfig(path=str(on_disk(tmp_path / "base")))
    made = build(base, load_config(base, "score"), CPU, 3).module
    made.save_pretrained(tmp_path / "reward")
    load_tokenizer(base).save_pretrained(tmp_path / "reward")
    reward = ModelConfig(path=str(tmp_path / "reward"))
    for head in (None, "score"):
        read = build(reward, load_config(reward, head), CPU, 9).module
        assert torch.equal(output_head(read).weight, output_head(made).weight)
    with pytest.raises(ConfigError, match="no log-probabilities of tokens"):
        load_config(reward, "lm")


def test_missing_weights_of_the_body_are_an_error(tmp_path):
    base = on_disk(tmp_path / "base", num_hidden_layers=1)
    config = base / "config.json"
    config.write_text(config.read_text().replace('"num_hidden_layers": 1', '"num_hidden_layers": 2'))
    model = ModelConfig(path=str(base))
    with pytest.raises(StorageError, match="not in the files"):
        build(model, load_config(model, "score"), CPU, 0)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (tiny_model("granite"), "granite model, for which transformers has no head that scores documents"),
        (
            ModelConfig(path=None, init=Init.random, architecture={"model_type": "modernbert-decoder"}),
            "modernbert-decoder model, which has another head for scores",
        ),
    ],
    ids=["no class", "another head"],
)
def test_family_without_such_a_head_is_refused(config, reason):
    with pytest.raises(ConfigError, match=reason):
        load_config(config, "score")


def test_classifier_of_several_labels_is_refused_for_one_number(tmp_path, capsys):
    config = load_config(random_model("llama"), "score")
    config.id2label = {0: "bad", 1: "good", 2: "best"}
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "classes")
    word_tokenizer(eos_token="t1", unk_token="t0").save_pretrained(tmp_path / "classes")
    words = [
        f"model.path={tmp_path / 'classes'}",
        "model.tokenizer=null",
        "data.questions.path=null",
        f"run.dir={tmp_path / 'run'}",
    ]
    assert main(["+recipe=dpo_quickstart", "objective=reward", *words]) == 2
    assert "has 3 labels" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("special", "padding"),
    [
        ({"eos_token": "t1", "unk_token": "t0"}, "t0"),
        ({"eos_token": "t1", "pad_token": "t1", "unk_token": "t0"}, "t0"),
        ({"eos_token": "t1", "pad_token": "t5"}, "t5"),
        ({"eos_token": "t1", "pad_token": "t1", "unk_token": "t1"}, "t127"),
        ({"eos_token": "t1", "extra_special_tokens": ["t7", "t9"]}, "t9"),
        ({"eos_token": "t1", "unk_token": "t0", "extra_special_tokens": ["<pad>"]}, "<pad>"),
    ],
)
def test_padding_ends_no_document(tmp_path, special, padding):
    base = on_disk(tmp_path / "base", vocab_size=129)
    word_tokenizer(**special).save_pretrained(base)
    model = ModelConfig(path=str(base))
    config = load_config(model, "score")
    tokenizer = load_tokenizer(model, config)
    assert tokenizer.pad_token == padding
    assert config.pad_token_id == tokenizer.pad_token_id != tokenizer.eos_token_id
