"""Settings of the data group that contradict each other."""

from __future__ import annotations

import pytest

from fxtune.data.config import DataConfig, MixConfig, SourceConfig
from fxtune.errors import ConfigError


def test_eval_fraction_with_eval_sources_is_refused():
    with pytest.raises(ConfigError, match=r"data.eval_fraction and data.eval_sources are both set"):
        DataConfig(eval_fraction=0.1, eval_sources=[SourceConfig(path="x")]).validate()
    with pytest.raises(ConfigError, match="eval_sources have no weights"):
        DataConfig(eval_sources=[SourceConfig(path="x", weight=1.0)]).validate()


@pytest.mark.parametrize(
    ("share", "threshold", "weight", "said"),
    [
        (0.0, 16, None, r"data.mix.long_share=0.0: give a share above 0 and below 1"),
        (1.0, 16, None, r"data.mix.long_share=1.0"),
        (0.5, 64, None, r"data.mix.threshold=64: no document can be longer than data.sequence_length=64"),
        (0.5, 0, None, r"data.mix.threshold=0"),
        (0.5, 16, 1.0, r"data.mix.long_share and the weights of data.sources both set"),
    ],
)
def test_invalid_mix_is_refused_before_files_are_read(share, threshold, weight, said):
    with pytest.raises(ConfigError, match=said):
        DataConfig(
            sources=[SourceConfig(path="a", weight=weight)], sequence_length=64, mix=MixConfig(share, threshold)
        ).validate()
