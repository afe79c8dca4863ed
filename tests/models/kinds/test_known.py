"""Which kind a model is, by its config alone; a model of no kind is refused with the reason."""

from __future__ import annotations

import pytest
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

from fxtune.errors import ConfigError
from fxtune.models.kinds.decoder import Decoder
from fxtune.models.kinds.known import families, kind_of


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_moe", "gpt_oss"])
def test_decoder_of_text_is_found_by_its_config(family):
    kind = kind_of(CONFIG_MAPPING[family]())
    assert isinstance(kind, Decoder)
    assert kind.auto is AutoModelForCausalLM
    assert family in families()


@pytest.mark.parametrize("family", ["gemma3", "qwen2_5_vl", "smolvlm"])
def test_decoder_that_reads_images_is_found_by_its_config(family):
    kind = kind_of(CONFIG_MAPPING[family]())
    assert kind.images
    assert kind.auto is AutoModelForImageTextToText
    assert family in families()


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("blip-2", "is a blip-2 model, which fxtune has not compared with plain transformers.*qwen2_5_vl"),
        ("vit", "model.path is a vit model, which is no causal language model"),
    ],
)
def test_model_of_no_kind_is_refused_with_the_reason(family, reason):
    with pytest.raises(ConfigError, match=reason):
        kind_of(CONFIG_MAPPING[family]())


def test_code_of_the_author_counts_where_it_may_run():
    config = CONFIG_MAPPING["vit"]()
    config.auto_map = {"AutoModelForCausalLM": "modeling.py"}
    assert isinstance(kind_of(config), Decoder)
    with pytest.raises(ConfigError, match=r"model.path=x is a vit model"):
        kind_of(config, "model.path=x", own_code=False)
