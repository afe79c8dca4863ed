"""Which model types keep the documents of a packed row apart, tried with a small model."""

from __future__ import annotations

import pytest
import torch
from support import image_models
from support.architectures import ARCHITECTURES, FAMILIES, architecture
from support.cases import slow_but
from support.decoder_sizes import decoder_sizes
from transformers import CONFIG_MAPPING

from fxtune.models.load import Init, ModelConfig, load_config
from fxtune.techniques.attention import isolation, recurrent
from fxtune.techniques.attention.backends.registry import FLASH4

KNOWN = {kind: architecture(kind) for kind in ARCHITECTURES} | {kind: FAMILIES[kind] for kind in ("gemma", "phi")}


PROVEN = slow_but(
    sorted(isolation.PROVEN & KNOWN.keys()), "deepseek_v3", "gemma2", "llama", "llama4_text", "qwen3_moe"
)


def decoder(kind: str):
    return load_config(ModelConfig(path=None, init=Init.random, architecture=KNOWN[kind])).get_text_config()


@pytest.mark.parametrize("kind", PROVEN)
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


@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_5_moe_text"])
def test_a_hybrid_that_is_called_proven_keeps_documents_apart_and_shares_no_prompt(kind):
    assert kind in isolation.PROVEN
    given = architecture("qwen3_next")
    known = CONFIG_MAPPING[kind]().to_dict()
    keys = {**{name: value for name, value in given.items() if name in known}, "model_type": kind}
    config = load_config(ModelConfig(path=None, init=Init.random, architecture=keys)).get_text_config()
    tried = isolation.try_small_model(config)
    assert tried.packed is None
    assert tried.looks_ahead <= isolation.LOOKS_AHEAD
    assert isolation.why_not_shared(config.to_dict()) is not None


@pytest.mark.parametrize("shared", [0, 10])
@pytest.mark.parametrize("kind", ["gemma3n_text", "gemma4_text"])
def test_layers_that_share_keys_and_values_are_tried(kind, shared):
    layers = (["sliding_attention"] * 4 + ["full_attention"]) * 4
    lists = {"intermediate_size": [96] * 20, "activation_sparsity_pattern": [0.9] * 10 + [0.0] * 10}
    sizes = {"head_dim": 16, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 128}
    of_kind = lists if kind == "gemma3n_text" else {"global_head_dim": 32, "use_double_wide_mlp": True}
    keys = {**architecture("llama"), "model_type": kind, **sizes, **of_kind, "num_hidden_layers": 20}
    keys |= {"layer_types": layers, "num_kv_shared_layers": shared}
    config = load_config(ModelConfig(path=None, init=Init.random, architecture=keys))
    assert isolation.try_small_model(config).packed is None


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
                **decoder_sizes(layers=200, heads=4, key_heads=4),
                "vocab_size": 1_000_000,
            },
        )
    )
    assert isolation.why_not_isolated(wide) is None


@pytest.mark.parametrize("kind", PROVEN)
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


@pytest.mark.parametrize("family", image_models.FAMILIES)
def test_decoders_that_read_images_share_a_prompt_of_text(family):
    model = image_models.model(family)
    FLASH4.prepare()
    model.set_attn_implementation(FLASH4.implementation)
    recurrent.separate(model)
    with torch.no_grad():
        shares = isolation.share_prompt(model).is_exact
    assert shares == (family not in ("qwen3_5", "qwen3_5_moe"))  # a state that runs through both answers
