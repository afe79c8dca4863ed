"""Conflicts between keys whose values are in range."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from fxtune.config.root import Config, completed


def test_defaults_do_not_conflict():
    assert list(Config().refusals()) == []


@pytest.mark.parametrize("name", ["", ".", ".hidden", "a/b", "a\\b", "a\nb"])
def test_run_name_must_be_a_folder_name(name):
    config = Config()
    config.run.name = name
    assert "names a folder below runs/" in next(config.refusals())


def test_every_conflict_is_reported():
    config = Config()
    config.train.micro_batch_size, config.optimizer.betas, config.train.eval_every = 3, [0.9], 10
    config.data.buckets = [4, 2]
    assert len(list(config.refusals())) == 4


def test_earlier_config_names_its_objective_below_train():
    now = json.loads(json.dumps(asdict(Config())))
    earlier = {**now, "train": {**now["train"], "objective": "causal_lm"}}
    del earlier["objective"]
    assert completed(earlier) == now
    assert completed({**earlier, "train": {"objective": "focal"}})["objective"] == {"name": "focal"}
