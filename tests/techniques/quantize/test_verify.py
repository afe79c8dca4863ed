"""What a proof of quantized weights finds."""

from __future__ import annotations

import pytest
import torch
from support.architectures import prepared_model, random_model
from support.quantized import qlora

from fxtune.errors import ConfigError
from fxtune.techniques.pipeline import make_probe


def test_verify_finds_an_unquantized_or_trained_linear():
    pipeline = qlora()
    prepared = prepared_model(pipeline, random_model("llama"))
    mine = prepared.module
    layer = mine.get_base_model().model.layers[1].mlp.up_proj
    layer.base_layer, kept = torch.nn.Linear(64, 96, bias=False).requires_grad_(False), layer.base_layer
    with pytest.raises(ConfigError, match="asked for 14 linears in nf4; seen: 13 in nf4"):
        pipeline.prove(prepared, make_probe(mine))
    layer.base_layer = kept
    prepared.quantization.error = 0.5
    with pytest.raises(ConfigError, match=r"relative error below 0\.15\); seen: 0\.5000 in the first linear"):
        pipeline.prove(prepared, make_probe(mine))
