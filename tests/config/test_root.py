"""Conflicts between keys whose values are in range."""

from __future__ import annotations

import pytest

from fxtune.config.root import Config
from fxtune.data.config import SourceConfig


def test_defaults_do_not_conflict():
    assert list(Config().conflicts()) == []


@pytest.mark.parametrize("name", ["", ".", ".hidden", "a/b", "a\\b", "a\nb"])
def test_run_name_must_be_a_folder_name(name):
    config = Config()
    config.run.name = name
    assert "names a folder below runs/" in next(config.conflicts())


def test_every_conflict_is_reported():
    config = Config()
    config.train.micro_batch_size, config.optimizer.betas, config.data.buckets = 3, [0.9], [4, 2]
    config.data.eval_fraction, config.data.eval_sources = 0.1, [SourceConfig("x")]
    assert len(list(config.conflicts())) == 4
