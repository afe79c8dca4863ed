"""The parts of a causal language model, and the same model without weights."""

from __future__ import annotations

import pytest
import torch
from support.architectures import built, facts_of, lora, random_model

from fxtune.facts.options import Switch
from fxtune.models.structure import (
    backbone,
    base_dtype,
    beside_text,
    decoder_layers,
    is_named,
    parameter_counts,
    skeleton,
    without_dropout,
)


def test_layers_and_decoder_are_found_under_adapters():
    model = built(lora(), random_model("llama", num_hidden_layers=3))
    assert len(decoder_layers(model)) == 3
    decoder = backbone(model)
    hidden = decoder(torch.arange(5)[None]).last_hidden_state
    assert hidden.shape == (1, 5, model.config.hidden_size)
    assert beside_text(model) == []
    assert base_dtype(model) is torch.float32


def test_path_ends_with_whole_names_only():
    assert is_named("model.layers.0.mlp.up_proj", "mlp.up_proj")
    assert is_named("up_proj", "up_proj")
    assert not is_named("model.gate_up_proj", "up_proj")


def test_skeleton_has_no_weights_and_is_shared():
    facts = facts_of(random_model("qwen3"))
    found = skeleton(facts.model)
    assert {parameter.device.type for parameter in found.parameters()} == {"meta"}
    assert skeleton(dict(facts.model)) is found
    assert skeleton({"model_type": "of tomorrow"}) is None


@pytest.mark.parametrize("fused", [Switch.off, Switch.on])
def test_weights_are_counted_without_the_space_for_adapters(fused):
    model = built(lora(fused=fused), random_model("llama"))
    plain = sum(weight.numel() for weight in skeleton(facts_of(random_model("llama")).model).parameters())
    assert sum(n for name, n in parameter_counts(model).items() if "lora_" not in name) == plain


def test_observation_restores_training_and_the_random_state():
    model = built(lora(), random_model("llama")).train()
    before = torch.get_rng_state()
    with without_dropout(model):
        assert not model.training
        torch.rand(3)
    assert model.training
    assert torch.equal(torch.get_rng_state(), before)
