"""The evidence of checkpointing notices layers, operators and tensors that do not act as the options say."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from support.architectures import built, lora, prepared_model, random_model
from support.checkpointing import checkpointed, gradients, seen

from fxtune.errors import ConfigError
from fxtune.facts.options import Policy
from fxtune.models.structure import decoder_layers
from fxtune.techniques.pipeline import Pipeline, make_probe


def test_verify_leaves_no_gradients_and_evaluation_is_not_recomputed():
    pipeline = checkpointed(Pipeline(), mlp_tiles=2)
    prepared = prepared_model(pipeline, random_model("llama"))
    model = prepared.module.train()
    pipeline.prove(prepared, make_probe(model))
    assert all(parameter.grad is None for parameter in model.parameters())
    with torch.no_grad():
        assert model.generate(input_ids=torch.ones(1, 3, dtype=torch.long), max_new_tokens=3).shape == (1, 6)


def test_layers_below_the_first_trained_one_are_not_expected_to_run_twice():
    pipeline = checkpointed(lora(target_modules=["layers.1.mlp.down_proj"]))
    seen(pipeline, built(pipeline, random_model("llama")))


def test_verify_fails_if_a_layer_is_not_wrapped():
    pipeline = checkpointed(lora())
    prepared = prepared_model(pipeline, random_model("llama"))
    model = prepared.module
    del decoder_layers(model)[1].forward
    with pytest.raises(ConfigError, match="2 of 2 layers recomputed; seen: 1 of 2"):
        pipeline.prove(prepared, make_probe(model))


def test_verify_fails_if_a_named_operator_never_runs():
    pipeline = checkpointed(lora(), policy=Policy.selective, save=["attention", "aten.addmm"])
    prepared = prepared_model(pipeline, random_model("llama"))
    model = prepared.module
    with pytest.raises(ConfigError, match=r"never ran: aten\.addmm"):
        pipeline.prove(prepared, make_probe(model))


def test_verify_fails_if_a_saved_operator_runs_again():
    pipeline = checkpointed(lora(), policy=Policy.selective, save=["attention"])
    prepared = prepared_model(pipeline, random_model("llama"))
    model = prepared.module
    pipeline.checkpointing.save = []
    with pytest.raises(ConfigError, match="kept: attention, matmuls; seen"):
        pipeline.prove(prepared, make_probe(model))


@pytest.mark.parametrize(
    "options", [{}, {"policy": Policy.selective}, {"policy": Policy.none}], ids=["full", "selective", "none"]
)
def test_model_is_freed_after_verify_and_training(options):
    """What its evidence was taken from is no part of what stays: the next run in a process has all of the memory."""
    pipeline = checkpointed(lora(), **options)
    model = built(pipeline, random_model("llama"))
    seen(pipeline, model)
    gradients(model)
    weights = [weakref.ref(parameter) for parameter in model.parameters()]
    del model
    gc.collect()
    assert not any(weight() is not None for weight in weights)
