"""Parameters counted from a config are those of the built model."""

from __future__ import annotations

import pytest
from support.architectures import CPU, FAMILIES, random_model

from fxtune.models.dims import Shape
from fxtune.models.load import build, load_config


@pytest.mark.parametrize("family", FAMILIES)
def test_counted_parameters_match_the_model(family):
    model = random_model(family)
    config = load_config(model)
    shape = Shape.of(config.get_text_config().to_dict())
    total = sum(parameter.numel() for parameter in build(model, config, CPU, 0).module.parameters())
    counted = shape.linear_parameters + shape.other_parameters
    if family == "phi":  # its MLP has no gate, and one is counted
        assert counted > total
    else:
        assert counted == pytest.approx(total, rel=0.02)  # biases and extra norms are not counted


def test_sizes_that_a_config_leaves_out_are_those_of_llama():
    shape = Shape.of({"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 100})
    assert (shape.inner, shape.q, shape.k, shape.experts, shape.tied) == (256, 64, 64, 1.0, False)
    assert shape.linears["down_proj"] == (256, 64)
