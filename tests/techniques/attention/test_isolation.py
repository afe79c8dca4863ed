"""Which model types keep the documents of a packed row apart, tried with a small model."""

from __future__ import annotations

import pytest
import torch
from support import image_models
from support.architectures import ARCHITECTURES, FAMILIES, architecture

from fxtune.models.load import Init, ModelConfig, load_config
from fxtune.techniques.attention import isolation
from fxtune.techniques.attention.backends.registry import FLASH4

KNOWN = {kind: architecture(kind) for kind in ARCHITECTURES} | {kind: FAMILIES[kind] for kind in ("gemma", "phi")}


def decoder(kind: str):
    return load_config(ModelConfig(path=None, init=Init.random, architecture=KNOWN[kind])).get_text_config()


@pytest.mark.parametrize("kind", sorted(isolation.PROVEN & KNOWN.keys()))
def test_every_kind_that_is_called_proven_keeps_documents_apart(kind):
    assert isolation.try_small_model(decoder(kind)).packed is None


@pytest.mark.parametrize("kind", ["bloom", "gpt_oss", "opt"])
def test_kinds_whose_mask_ignores_documents_are_found_by_trying(kind):
    assert (
        isolation.why_not_isolated(decoder(kind)) == f"in {kind} of transformers, documents in one row see each other"
    )


@pytest.mark.parametrize(("kind", "apart"), [("bloom", False), ("gpt_oss", True), ("opt", True)])
def test_a_kernel_that_reads_the_bounds_of_documents_separates_them(kind, apart):
    assert (isolation.why_not_isolated(decoder(kind), by_bounds=True) is None) == apart


@pytest.mark.parametrize("kind", ["mamba2", "qwen3_next"])
def test_recurrent_layers_are_tried_with_their_documents_apart(kind):
    assert isolation.why_not_isolated(decoder(kind)) is None


def test_a_kind_that_cannot_be_tried_counts_as_not_isolated(monkeypatch):
    monkeypatch.setattr(isolation, "movement", lambda *_: {}["no"])
    isolation._try_small_model.cache_clear()
    assert "could not be tried" in isolation.why_not_isolated(decoder("opt"))
    isolation._try_small_model.cache_clear()


def test_a_wide_model_is_tried_small():
    wide = load_config(
        ModelConfig(
            path=None,
            init=Init.random,
            architecture={
                "model_type": "stablelm",
                "hidden_size": 128,
                "intermediate_size": 100_000,
                "num_hidden_layers": 200,
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "vocab_size": 1_000_000,
            },
        )
    )
    assert isolation.why_not_isolated(wide) is None


@pytest.mark.parametrize("kind", sorted(isolation.PROVEN & KNOWN.keys()))
def test_every_kind_that_is_called_proven_shares_a_prompt(kind):
    """By the kernel's reference, so that it need not be tried before each run."""
    assert isolation.try_small_model(decoder(kind), by_bounds=True).shared is None


@pytest.mark.parametrize(
    ("kind", "shares"), [("bloom", False), ("opt", True), ("mamba2", False), ("qwen3_next", False)]
)
def test_other_kinds_are_tried(kind, shares):
    why = isolation.why_not_shared(decoder(kind).to_dict())
    assert (why is None) == shares
    assert shares or why.startswith((f"in {kind} of transformers, answers that share a prompt", "whether"))


@pytest.mark.parametrize("family", image_models.CONFIGS)
def test_decoders_that_read_images_share_a_prompt_of_text(family):
    model = image_models.model(family)
    FLASH4.prepare()
    model.set_attn_implementation(FLASH4.implementation)
    with torch.no_grad():
        assert isolation.share_prompt(model).is_exact
