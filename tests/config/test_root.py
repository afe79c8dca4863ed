"""Conflicts between keys whose values are in range."""

from __future__ import annotations

import pytest

from fxtune.config.root import Config


def test_defaults_do_not_conflict():
    assert list(Config().conflicts()) == []


@pytest.mark.parametrize("name", ["", ".", ".hidden", "a/b", "a\\b", "a\nb"])
def test_run_name_must_be_a_folder_name(name):
    config = Config()
    config.run.name = name
    assert "names a folder below runs/" in next(config.conflicts())


def test_every_conflict_is_reported():
    config = Config()
    config.train.micro_batch_size, config.optimizer.betas, config.train.eval_every = 3, [0.9], 10
    config.data.buckets = [4, 2]
    assert len(list(config.conflicts())) == 4
