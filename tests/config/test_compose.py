"""From a composed config to dataclasses: types, ranges, missing values, and the order of precedence."""

from __future__ import annotations

import dataclasses

import pytest
from omegaconf import OmegaConf

from fxtune.config.compose import load, typed
from fxtune.config.root import Config
from fxtune.data.formats.row_format import LearnConfig
from fxtune.errors import ConfigError


def test_empty_config_has_the_defaults_and_they_are_in_range():
    assert typed(OmegaConf.create({})) == Config()


def test_config_survives_yaml(cwd):
    config = load(["+recipe=llama_yarn_64k", "run.seed=5"])
    text = OmegaConf.to_yaml(OmegaConf.structured(config))
    assert typed(OmegaConf.create(text)) == config
    assert typed(OmegaConf.create(dataclasses.asdict(config))) == config


def test_nearer_to_the_user_wins(cwd):
    (cwd / "recipes").mkdir()
    (cwd / "recipes" / "base.yaml").write_text("optimizer: {lr: 1, weight_decay: 1, eps: 1, momentum: 0.1}\n")
    (cwd / "recipes" / "mine.yaml").write_text(
        "defaults: [_self_, base, {override /optimizer: muon}]\noptimizer: {weight_decay: 2, eps: 2}\n"
    )
    optimizer = load(["optimizer.eps=3", "optimizer=adamw", "optimizer.momentum=0.9", "recipe=mine"]).optimizer
    assert optimizer.name.value == "adamw", "a group of the command line wins over the recipe's"
    assert optimizer.lr == 2e-4, "and over what the recipe sets"
    muon = load(["optimizer.eps=3", "recipe=mine"]).optimizer
    assert muon.momentum == 0.95, "a group that a recipe names comes after the recipe that it builds on"
    assert muon.weight_decay == 2, "the recipe wins over what it builds on, wherever its defaults list has _self_"
    assert optimizer.eps == 3, "a key of the command line wins over all"


def test_a_word_in_place_of_a_section_is_one_of_its_switches(cwd):
    (cwd / "recipes").mkdir()
    (cwd / "recipes" / "mine.yaml").write_text("# @package _global_\ndata: {learn: since_last_question}\n")
    for argv in (["+recipe=mine"], ["data.learn=since_last_question"], ["data.learn.since_last_question=true"]):
        learn = load(argv).data.learn
        assert (learn.since_last_question, learn.last_turn_only) == (True, False)
    assert load(["+recipe=mine", "data.learn.since_last_question=false"]).data.learn == LearnConfig()
    with pytest.raises(ConfigError, match=r"or the words last_turn_only"):
        load(["data.learn=since_last"])


def test_pointers_between_keys_are_resolved(cwd):
    config = load(
        ["+recipe=quickstart", "train.log_every=7", "checkpoint.every=${train.log_every}", "run.name=n-${run.seed}"]
    )
    assert config.checkpoint.every == 7
    assert config.run.name == "n-0"


def test_pointer_to_another_type_is_an_error(cwd):
    with pytest.raises(ConfigError, match=r"optimizer\.lr"):
        load(["+recipe=quickstart", "optimizer.lr=${run.name}"])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"optimizer": {"lrr": 1}}, "did you mean `optimizer.lr`"),
        ({"optimizer": {"lr": "fast"}}, "is a number"),
        ({"data": {"sources": [{}]}}, "`data.sources.0.path` is not set"),
        ({"run": {"name": "a/b"}}, "names a folder"),
        ({"run": {"name": "."}}, "names a folder"),
        ({"train": {"micro_batch_size": 3}}, "must be a multiple"),
        ({"optimizer": {"betas": [0.9]}}, "two numbers"),
        ({"optimizer": {"betas": [0.9, 1.0]}}, "`optimizer.betas.1=1.0` must be at least 0 and below 1"),
        ({"data": {"buckets": [4, 2], "packing": False}}, "in ascending order"),
        ({"train": {"eval_every": 10}}, "nothing is held out"),
        ({"data": {"sources": [{"path": "x", "weight": -1}]}}, "`data.sources.0.weight=-1.0` must be above 0"),
        ({"optimizer": {"lr": float("inf")}}, "not a finite number"),
    ],
)
def test_impossible_values_are_refused(config, message):
    with pytest.raises(ConfigError) as caught:
        typed(OmegaConf.create(config))
    assert message in str(caught.value)


def test_all_problems_are_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        typed(OmegaConf.create({"optimizer": {"lr": 0}, "train": {"max_steps": 0}, "run": {"seed": -1}}))
    assert len(str(caught.value).splitlines()) == 3


def test_range_holds_for_the_value_of_a_pointer(cwd):
    with pytest.raises(ConfigError, match=r"`train\.log_every=0` must be at least 1"):
        load(["+recipe=quickstart", "train.log_every=${run.seed}"])


def test_environment_is_not_read_even_if_nothing_was_checked_before(monkeypatch):
    monkeypatch.setenv("FXTUNE_TEST_SECRET", "hunter2-hunter2")
    with pytest.raises(ConfigError, match="never at the environment") as caught:
        typed(OmegaConf.create({"run": {"name": "${oc.env:FXTUNE_TEST_SECRET}"}}))
    assert "hunter2" not in str(caught.value)
