"""Checkpointing: the same gradients, with the layers that were asked for run a second time."""

from __future__ import annotations

import pytest
import torch
from architectures import FAMILIES, built, facts_of, lora, random_model

from fxtune.errors import ConfigError
from fxtune.pipeline import Pipeline, make_probe
from fxtune.technique import decoder_layers
from fxtune.techniques.checkpointing import Checkpointing


def checkpointed(pipeline: Pipeline, every: int = 1) -> Pipeline:
    pipeline.checkpointing = Checkpointing(enabled=True, every=every)
    return pipeline


def gradients(model) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)  # dropout
    model.train()
    model(**make_probe(model)).logits.logsumexp(-1).sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("pipelines", [lambda: lora(dropout=0.3), Pipeline], ids=["lora", "full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_without_it_dropout_and_all(family, pipelines):
    model = random_model(family, attention_dropout=0.2)
    plain, saved = gradients(built(pipelines(), model)), gradients(built(checkpointed(pipelines()), model))
    assert plain.keys() == saved.keys()
    assert all(torch.equal(plain[name], saved[name]) for name in plain)


@pytest.mark.parametrize(("every", "recomputed"), [(1, 4), (2, 2), (3, 2), (4, 1)])
def test_one_layer_in_every_is_recomputed(every, recomputed):
    pipeline = checkpointed(lora(), every)
    model = built(pipeline, random_model("llama", num_hidden_layers=4))
    (evidence,) = pipeline.checkpointing.verify(model, make_probe(model))
    assert evidence.acted
    assert evidence.observed.startswith(f"{recomputed} of 4 layers ran twice")


def test_it_keeps_fewer_activations():
    """What autograd keeps, in bytes, is what this is for."""

    def kept(pipeline: Pipeline) -> int:
        model = built(pipeline, random_model("llama", num_hidden_layers=8))
        total = 0

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal total
            total += tensor.numel() * tensor.element_size() * (not isinstance(tensor, torch.nn.Parameter))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(**make_probe(model))
        return total

    assert kept(checkpointed(lora())) < kept(lora()) / 4


def test_verify_leaves_no_gradients_and_evaluation_is_not_recomputed():
    pipeline = checkpointed(Pipeline())
    model = built(pipeline, random_model("llama")).train()
    pipeline.prove(model, make_probe(model))
    assert all(parameter.grad is None for parameter in model.parameters())
    with torch.no_grad():
        assert model.generate(input_ids=torch.ones(1, 3, dtype=torch.long), max_new_tokens=3).shape == (1, 6)


def test_layers_below_the_first_trained_one_need_no_recomputation():
    pipeline = checkpointed(lora(target_modules=["layers.1.mlp.down_proj"]))
    model = built(pipeline, random_model("llama"))
    (evidence,) = pipeline.checkpointing.verify(model, make_probe(model))
    assert evidence.acted


def test_a_layer_that_lost_its_wrapping_is_noticed():
    pipeline = checkpointed(lora())
    model = built(pipeline, random_model("llama"))
    del decoder_layers(model)[1].forward
    with pytest.raises(ConfigError, match="2 of 2 layers recomputed; seen: 1 of 2"):
        pipeline.prove(model, make_probe(model))


@pytest.mark.parametrize("every", [0, 3])
def test_every_has_bounds(every):
    assert "every: " in next(Checkpointing(enabled=True, every=every).check(facts_of(random_model("llama"))))
