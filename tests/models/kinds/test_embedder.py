"""Models that give vectors: the config for their head, and the bodies that have none."""

from __future__ import annotations

import pytest
from transformers import AutoConfig

from fxtune.errors import ConfigError
from fxtune.models.kinds.known import kind_of, with_head, with_head_of_task


def test_config_of_a_decoder_becomes_the_config_of_its_body():
    config = AutoConfig.for_model("llama", architectures=["LlamaForCausalLM"])
    made = with_head(config, "pool")
    assert made.architectures == ["LlamaModel"]
    assert kind_of(made).head == "pool"
    assert config.architectures == ["LlamaForCausalLM"]
    assert with_head_of_task(config, "FEATURE_EXTRACTION").architectures == ["LlamaModel"]
    assert with_head_of_task(config, "CAUSAL_LM") is config


def test_model_with_images_is_refused():
    config = AutoConfig.for_model("qwen2_5_vl", architectures=["Qwen2_5_VLForConditionalGeneration"])
    with pytest.raises(ConfigError, match="makes no vectors"):
        with_head(config, "pool")
