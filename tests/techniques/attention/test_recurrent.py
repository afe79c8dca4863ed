"""Packed documents in recurrent layers: each as if it were alone, and no other one moves it."""

from __future__ import annotations

import copy
import dataclasses
import random

import pytest
import torch
from support import architectures
from support.architectures import CPU, architecture, facts_of, lora
from support.cases import slow_but

from fxtune.errors import ConfigError
from fxtune.facts.options import Autocast
from fxtune.models.load import Init, ModelConfig, load_config
from fxtune.techniques.assemble import assemble
from fxtune.techniques.attention import isolation, recurrent
from fxtune.techniques.pipeline import Pipeline, make_probe

SIZES = {**architectures.SIZES, "max_position_embeddings": 256}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_chunk_size": 16}
DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "head_dim": 16,
}
_without_limit = {name: size for name, size in SIZES.items() if name != "max_position_embeddings"}
HYBRIDS = {
    "bamba": {**SIZES, **MAMBA2, "attn_layer_indices": [1]},
    "falcon_h1": {**SIZES, **MAMBA2, "mamba_d_ssm": 128, "head_dim": 16},
    "falcon_mamba": {"hidden_size": 64, "num_hidden_layers": 2, "state_size": 16, "vocab_size": 128},
    "lfm2": {**SIZES, "layer_types": ["conv", "full_attention"]},
    "mamba": architecture("mamba"),
    "mamba2": architecture("mamba2"),
    "minimax": {
        **SIZES,
        "head_dim": 16,
        "num_local_experts": 4,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "olmo_hybrid": {**SIZES, **DELTA, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1},
    "qwen3_5_text": {**SIZES, **DELTA},
    "qwen3_next": architecture("qwen3_next"),
    "recurrent_gemma": {**_without_limit, "head_dim": 16, "lru_width": 64, "block_types": ["recurrent", "attention"]},
}


def config_of(kind: str) -> ModelConfig:
    return ModelConfig(path=None, init=Init.random, architecture={"model_type": kind, **HYBRIDS[kind]})


def model_of(kind: str):
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(load_config(config_of(kind)), dtype=torch.float32)


def packed(lengths: list[int], rows: int = 1) -> dict[str, torch.Tensor]:
    """Each row has documents of these lengths; the last row has them in the other order."""
    orders = [lengths] * (rows - 1) + [lengths[::-1]]
    positions = torch.stack([torch.cat([torch.arange(length) for length in order]) for order in orders])
    return {"input_ids": torch.randint(3, 128, positions.shape), "position_ids": positions}


@pytest.mark.parametrize("kind", slow_but(HYBRIDS, "mamba2", "qwen3_next"))
def test_a_packed_document_is_as_if_alone_whatever_its_neighbours(kind):
    """For random lengths: other logits do not move by a bit, and loss and gradients are those of lone documents."""
    plain = model_of(kind)
    mine, draw = copy.deepcopy(plain), random.Random(kind)
    recurrent.separate(mine)
    for trial in range(3):
        lengths = [draw.randint(1, 30) for _ in range(draw.randint(2, 6))]
        row = packed(lengths, rows=1 + trial % 2)
        with torch.no_grad():
            count, moved, leaked = isolation.movement(mine.eval(), {**row, "use_cache": False})
        assert count > 1
        assert moved > 0
        assert leaked == 0
    alone = 0.0
    for ids, order in zip(row["input_ids"], (lengths, lengths[::-1])[-len(row["input_ids"]) :], strict=True):
        for document in ids.split(order):
            logits = plain(input_ids=document[None], use_cache=False).logits
            alone = alone + logits.logsumexp(-1).sum()
    together = mine(**row, use_cache=False).logits.logsumexp(-1).sum()
    assert abs(together - alone) <= 1e-5 * abs(alone)
    alone.backward()
    together.backward()
    theirs = dict(plain.named_parameters())
    for name, parameter in mine.named_parameters():
        wanted = theirs[name].grad
        if wanted is not None:
            assert (parameter.grad - wanted).norm() <= 1e-4 * wanted.norm() + 1e-5, name


def test_without_the_borders_documents_leak():
    """The test above can fail."""
    with torch.no_grad():
        _, moved, leaked = isolation.movement(model_of("mamba2").eval(), {**packed([7, 8, 9]), "use_cache": False})
    assert not isolation.is_isolated(moved, leaked)


def test_lone_documents_and_generation_run_as_they_were():
    plain = model_of("qwen3_next").eval()
    mine, row = copy.deepcopy(plain), packed([24])
    recurrent.separate(mine)
    with torch.no_grad():
        torch.testing.assert_close(mine(**row).logits, plain(**row).logits, rtol=1e-5, atol=1e-5)
        mine(**packed([12, 12]))  # leaves no document bounds behind for generation
        same = [model.generate(row["input_ids"], max_new_tokens=4, do_sample=False) for model in (mine, plain)]
    assert torch.equal(*same)


@pytest.mark.parametrize("kind", slow_but(HYBRIDS, "mamba2"))
def test_packing_can_be_demanded_and_is_proven(kind):
    pipeline = Pipeline()
    pipeline.lora.enabled = True
    chosen, _ = pipeline.resolved(facts_of(config_of(kind)))
    prepared = assemble(chosen, config_of(kind), load_config(config_of(kind)), CPU, 0)
    model = prepared.module
    evidence = chosen.prove(prepared, make_probe(model))
    (isolated,) = [observation for observation in evidence if "do not see each other" in observation.asked]
    assert isolated.observed.endswith("the others' by at most 0")


def test_attention_to_blocks_of_tokens_is_still_refused():
    """A short row does not show whether documents share a block."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    kinds = {"layer_types": ["full_attention", "minimax_m3_sparse"]}
    facts = facts_of(ModelConfig(path=None, init=Init.random, architecture={"model_type": "llama", **sizes}))
    changed = dataclasses.replace(facts, model={**facts.model, **kinds})
    with pytest.raises(ConfigError, match=r"the minimax_m3_sparse layers of llama carry state .* data\.packing=false"):
        Pipeline().check(changed)


def test_layers_without_operators_turn_the_compiler_off_and_true_is_refused():
    config = config_of("mamba")
    pipeline = Pipeline()
    pipeline.compile.enabled = "auto"
    chosen, notes = pipeline.resolved(facts_of(config))
    assert not chosen.compile.enabled
    assert any(
        note.startswith("compile: off, because recurrent layers run packed documents one by one") for note in notes
    )
    pipeline.compile.enabled = True
    with pytest.raises(ConfigError, match=r"compile\.enabled: recurrent layers .* Set data\.packing=false"):
        pipeline.resolved(facts_of(config))


@pytest.mark.parametrize(
    ("kind", "key"), [("qwen3_5_text", "model.dtype"), ("mamba2", "techniques.precision.autocast"), ("lfm2", None)]
)
def test_states_that_decay_are_refused_in_float16(kind, key):
    pipeline = lora()
    if key != "model.dtype":
        pipeline.precision.autocast = Autocast.float16
    facts = facts_of(config_of(kind), packing=False, dtype="float16" if key == "model.dtype" else "float32")
    if key is None:
        pipeline.check(facts)
        return
    with pytest.raises(ConfigError, match=f"{key}: .*{kind}.* in float16"):
        pipeline.check(facts)
