"""Settings of the data group that contradict each other."""

from __future__ import annotations

import pytest

from fxtune.data.config import DataConfig, MixConfig, QuestionsConfig, SourceConfig
from fxtune.errors import ConfigError


def test_eval_sources_replace_the_held_out_share():
    sources = [SourceConfig(path="a"), SourceConfig(path="b", eval_fraction=0.2)]
    config = DataConfig(sources=sources, eval_fraction=0.1, eval_sources=[SourceConfig(path="x")])
    config.validate()
    assert config.held_out_shares == (0, 0.2)
    assert DataConfig(sources=sources, eval_fraction=0.1).held_out_shares == (0.1, 0.2)
    assert not DataConfig(sources=sources[:1]).holds_out
    with pytest.raises(ConfigError, match="Remove eval_fraction there"):
        DataConfig(eval_sources=sources[1:]).validate()


def test_eval_sources_have_no_weights():
    with pytest.raises(ConfigError, match="eval_sources have no weights"):
        DataConfig(eval_sources=[SourceConfig(path="x", weight=1.0)]).validate()


def test_questions_that_ship_with_fxtune_belong_to_its_data():
    questions = QuestionsConfig(path="builtin:quickstart_test")
    shipped, own = SourceConfig("builtin:quickstart_train"), SourceConfig("mine.jsonl")
    assert DataConfig(sources=[own, shipped], questions=questions).applicable_questions() is questions
    assert DataConfig(sources=[own], questions=questions).applicable_questions().path is None
    mine = QuestionsConfig(path="held.jsonl")
    assert DataConfig(sources=[own], questions=mine).applicable_questions() is mine


@pytest.mark.parametrize(
    ("share", "threshold", "weight", "said"),
    [
        (0.5, 64, None, r"data.mix.threshold=64: no document can be longer than data.sequence_length=64"),
        (0.5, 16, 1.0, r"data.mix.long_share and the weights of data.sources both set"),
    ],
)
def test_invalid_mix_is_refused_before_files_are_read(share, threshold, weight, said):
    with pytest.raises(ConfigError, match=said):
        DataConfig(
            sources=[SourceConfig(path="a", weight=weight)], sequence_length=64, mix=MixConfig(share, threshold)
        ).validate()
