"""From a composed config to dataclasses: types, ranges, what is missing; and what wins over what."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from fxtune.config.compose import load, typed
from fxtune.config.introspection import all_keys
from fxtune.config.root import Config
from fxtune.config.validate import OTHER_NAMES, Validator
from fxtune.errors import ConfigError, nearest

KEYS = sorted(all_keys(Config))


def test_nothing_set_gives_the_dataclasses_defaults():
    assert typed(OmegaConf.create({})) == Config()


def test_a_config_that_went_through_yaml_comes_back_the_same(cwd):
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
    optimizer = load(["optimizer.eps=3", "optimizer=lion", "recipe=mine"]).optimizer
    assert optimizer.name.value == "lion", "a group of the command line wins over the recipe's"
    assert optimizer.lr == 6e-5, "and over what the recipe sets"
    assert optimizer.momentum == 0.95, "a group that a recipe names comes after the recipe that it builds on"
    assert optimizer.weight_decay == 2, "the recipe wins over what it builds on, wherever _self_ stands"
    assert optimizer.eps == 3, "a key of the command line wins over all"


def test_interpolation_between_keys_is_filled_in(cwd):
    config = load(
        ["+recipe=quickstart", "train.log_every=7", "checkpoint.every=${train.log_every}", "run.name=n-${run.seed}"]
    )
    assert config.checkpoint.every == 7
    assert config.run.name == "n-0"


def test_an_interpolation_of_another_type_is_an_error(cwd):
    with pytest.raises(ConfigError, match=r"optimizer\.lr"):
        load(["+recipe=quickstart", "optimizer.lr=${run.name}"])


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"optimizer": {"lrr": 1}}, "did you mean `optimizer.lr`"),
        ({"optimizer": {"lr": "fast"}}, "is a number"),
        ({"data": {"sources": [{}]}}, "`data.sources.0.path` is not set"),
        ({"run": {"name": "a/b"}}, "names a folder"),
        ({"run": {"name": "."}}, "names a folder"),
        ({"train": {"micro_batch_size": 3}}, "must be a multiple"),
        ({"optimizer": {"betas": [0.9]}}, "two numbers"),
        ({"optimizer": {"betas": [0.9, 1.0]}}, "`optimizer.betas.1=1.0` must be at least 0 and below 1"),
        ({"data": {"buckets": [4, 2]}}, "must ascend"),
        ({"data": {"eval_fraction": 0.1, "eval_sources": [{"path": "x"}]}}, "two ways to hold data out"),
        ({"train": {"eval_every": 10}}, "nothing is held out"),
        ({"data": {"sources": [{"path": "x", "weight": -1}]}}, "`data.sources.0.weight=-1.0` must be above 0"),
        ({"optimizer": {"lr": float("inf")}}, "not a finite number"),
    ],
)
def test_what_makes_no_sense_is_refused(config, told):
    with pytest.raises(ConfigError) as caught:
        typed(OmegaConf.create(config))
    assert told in str(caught.value)


def test_everything_that_is_wrong_is_told_at_once():
    with pytest.raises(ConfigError) as caught:
        typed(OmegaConf.create({"optimizer": {"lr": 0}, "train": {"max_steps": 0}, "run": {"seed": -1}}))
    assert len(str(caught.value).splitlines()) == 3


def test_ranges_and_hints_name_keys_that_exist():
    there = {key.replace(".0.", ".*.") for key in KEYS}
    assert set(OTHER_NAMES.values()) <= there


def test_every_number_of_the_config_is_in_range_by_default():
    assert typed(OmegaConf.create({})) == Config()


@given(st.sampled_from([key for key in KEYS if "." in key]), st.data())
def test_one_slip_of_the_finger_in_a_key_is_recognised(key, data):
    """Two letters swapped in the last part of any key: it is refused, and the right key is the one proposed."""
    above, _, last = key.rpartition(".")
    place = data.draw(st.integers(0, max(0, len(last) - 2)))
    slipped = last[:place] + last[place : place + 2][::-1] + last[place + 2 :]
    validator = Validator(Config, lambda _: "here", from_file=False)
    found = validator.find((*above.split("."), slipped))
    if slipped == last:
        assert found is not None
    else:
        assert found is None
        if len(last) > 3:
            assert f"did you mean `{key}`?" in validator.problems[0]


@given(st.text())
def test_nearest_only_proposes_what_there_is(word):
    assert nearest(word, ["optimizer", "train"]) in (None, "optimizer", "train")
