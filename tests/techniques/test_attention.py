"""Attention: the kernel that runs is the one asked for, and packed documents do not see each other."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from architectures import FAMILIES, built, random_model

from fxtune.errors import ConfigError
from fxtune.model import ModelConfig
from fxtune.pipeline import Pipeline, make_probe
from fxtune.techniques.attention import Attention, Backend
from fxtune.world import Facts


def using(backend: Backend) -> Pipeline:
    pipeline = Pipeline()
    pipeline.attention.backend = backend
    return pipeline


@pytest.mark.parametrize("backend", [Backend.sdpa, Backend.eager])
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gemma2"])
def test_each_backend_isolates_documents_in_every_family(family, backend):
    pipeline = using(backend)
    model = built(pipeline, random_model(family))
    kernel, isolation = pipeline.attention.verify(model, make_probe(model))
    assert kernel.acted, kernel
    assert kernel.observed.startswith(backend.value)
    assert isolation.acted, isolation


@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_document_has_the_logits_that_it_has_alone(family):
    model = built(Pipeline(), random_model(family)).eval()
    probe = make_probe(model)
    with torch.no_grad():
        packed = model(**probe).logits[0]
        starts = [*(probe["position_ids"][0] == 0).nonzero().flatten().tolist(), 24]
        for start, end in pairwise(starts):
            alone = model(input_ids=probe["input_ids"][:, start:end], use_cache=False).logits[0]
            torch.testing.assert_close(packed[start:end], alone, rtol=1e-5, atol=1e-5)


def test_auto_takes_sdpa_and_for_capped_scores_eager():
    for family, expected in (("llama", "sdpa"), ("gemma2", "eager")):
        pipeline = Pipeline()
        model = built(pipeline, random_model(family))
        kernel, isolation = pipeline.attention.verify(model, make_probe(model))
        assert kernel.asked.startswith(f"auto: {expected} (")
        assert kernel.acted
        assert isolation.acted


def test_sdpa_is_refused_for_capped_scores():
    with pytest.raises(ConfigError, match=r"techniques\.attention\.backend: sdpa leaves out the soft cap"):
        built(using(Backend.sdpa), random_model("gemma2"))


def test_packing_is_refused_for_layers_that_carry_state():
    hybrid = {"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"]}
    reasons = list(Attention(enabled=True).check(Facts(model=hybrid, packing=True)))
    assert "linear_attention layers of qwen3_next" in reasons[0]
    assert "data.packing=false" in reasons[0]
    assert not list(Attention(enabled=True).check(Facts(model=hybrid, packing=False)))


def test_a_kernel_that_was_swapped_is_noticed():
    pipeline = using(Backend.sdpa)
    model = built(pipeline, random_model("llama"))
    model.set_attn_implementation("eager")
    with pytest.raises(ConfigError, match="seen: eager: 0 calls"):
        pipeline.prove(model, make_probe(model))


def test_a_model_that_lets_documents_see_each_other_is_noticed(monkeypatch):
    """What a library that ignores position_ids does: one causal mask over the whole row."""
    from transformers.models.llama import modeling_llama

    pipeline = Pipeline()
    model = built(pipeline, random_model("llama"))
    proven = modeling_llama.create_causal_mask
    monkeypatch.setattr(modeling_llama, "create_causal_mask",
                        lambda **arguments: proven(**{**arguments, "position_ids": None}))
    with pytest.raises(ConfigError, match="asked for packed documents do not see each other"):
        pipeline.prove(model, make_probe(model))
    monkeypatch.undo()
    pipeline.prove(model, make_probe(model))


def test_a_model_whose_positions_do_not_separate_documents_is_noticed():
    """BLOOM places tokens by its attention mask, not by position_ids."""
    pipeline = Pipeline()
    model = built(pipeline, ModelConfig(path=None, init=random_model("llama").init, architecture={
        "model_type": "bloom", "hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128}))
    with pytest.raises(ConfigError, match="do not see each other"):
        pipeline.prove(model, make_probe(model))


def test_verify_leaves_mode_and_random_state_alone():
    pipeline = Pipeline()
    model = built(pipeline, random_model("llama")).train()
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    pipeline.verify(model, make_probe(model))
    assert torch.equal(torch.rand(2), expected)
    assert model.training
