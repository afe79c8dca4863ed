"""Attention: the kernel of the recipe runs, and packed documents do not see each other.

The kernels need a GPU (tests/gpu/test_attention.py). The code around them is tested here: flash4's operator has a CPU
implementation, and the requirements of each kernel are checked with invented machines.
"""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from support.architectures import CPU, FAMILIES, facts_of, prepared_model, random_model, tiny_model, word_tokenizer
from support.attention import unchecked, using
from support.cases import pairs
from torch.nn import functional as F

from fxtune.data.batches.batch import BatchSpec, build_batch
from fxtune.errors import ConfigError
from fxtune.export.save import save_model
from fxtune.facts.options import Autocast
from fxtune.facts.run import Facts
from fxtune.models import load as models
from fxtune.models.prepared import PreparedModel
from fxtune.models.structure import decoder_layers
from fxtune.techniques.attention import packed as packed_attention
from fxtune.techniques.attention.backends import flash4
from fxtune.techniques.attention.backends.flash4 import FLASH4
from fxtune.techniques.attention.inputs import model_inputs
from fxtune.techniques.attention.technique import Attention
from fxtune.techniques.pipeline import Pipeline, make_probe
from fxtune.training.answers import Question, answer

TOKENIZER = word_tokenizer(eos_token="t1", unk_token="t0", pad_token="t0")


@pytest.mark.parametrize(
    ("family", "backend"), pairs([family for family in FAMILIES if family != "gemma2"], ["sdpa", "eager"])
)
def test_each_backend_isolates_documents_in_every_family(family, backend):
    pipeline = using(backend)
    prepared = prepared_model(pipeline, random_model(family))
    model = prepared.module
    kernel, isolation = pipeline.attention.verify(prepared, make_probe(model))
    assert kernel.acted, kernel
    assert kernel.asked.startswith(backend)
    assert kernel.observed.startswith("2 calls of ")
    assert isolation.acted, isolation


@pytest.mark.parametrize(("family", "backend"), pairs([*FAMILIES], ["auto", "flash4"]))
def test_a_packed_document_has_the_same_logits_as_alone(family, backend):
    model = unchecked(backend, family).eval()
    probe = make_probe(model)
    with torch.no_grad():
        packed = model(**probe).logits[0]
        starts = [*(probe["position_ids"][0] == 0).nonzero().flatten().tolist(), 24]
        for start, end in pairwise(starts):
            alone = model(input_ids=probe["input_ids"][:, start:end], use_cache=False).logits[0]
            torch.testing.assert_close(packed[start:end], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_flash4_trains_like_eager(family):
    """Rows of several documents with padding, and rows of one document each."""
    for packed in (True, False):
        pieces = BatchSpec(
            source=np.zeros(3, np.int64),
            start=np.array([0, 9, 13]),
            length=np.array([9, 4, 11]),
            offsets=np.array([0, 2, 3] if packed else [0, 1, 2, 3]),
            width=14,
            packed=packed,
            pad_id=0,
            slots=8,
        )
        ids = np.random.default_rng(1).integers(1, 128, 24)
        batch = build_batch(
            [
                type(
                    "Table",
                    (),
                    {"ids": ids, "supervised": ids > 0, **dict.fromkeys(["stored", "images"])},
                )
            ],
            pieces,
        )
        losses, gradients = [], []
        for backend in ("eager", "flash4"):
            model = unchecked(backend, family)
            logits = model(**model_inputs(model, batch.input_ids, batch.position_ids, batch.cu_seqlens)).logits
            loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
            loss.backward()
            losses.append(loss.detach())
            gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-6)
        for name, gradient in gradients[0].items():
            torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-6)


def test_training_builds_no_mask_and_does_not_search_for_documents(monkeypatch):
    from transformers import masking_utils

    model = unchecked("flash4", "mistral_sliding")
    probe = make_probe(model)
    for name in ("sdpa_mask", "find_packed_sequence_indices"):
        monkeypatch.setattr(masking_utils, name, lambda *_, **__: pytest.fail("a mask is made"))
    model(**probe)


def test_the_profiler_sees_flash4_and_documents_are_isolated():
    model = unchecked("flash4", "llama")
    kernel, isolation = using("flash4").attention.verify(PreparedModel(model), make_probe(model))
    assert kernel.acted
    assert kernel.observed == "2 calls of FlashAttention-4 in 2 layers"
    assert isolation.acted
    assert not next(iter(using("sdpa").attention.verify(PreparedModel(model), make_probe(model)))).acted


@pytest.mark.slow
def test_flash4_compiles_as_one_graph_and_the_profiler_sees_it():
    pipeline = using("flash4")
    model, plain = unchecked("flash4", "qwen3"), unchecked("flash4", "qwen3")
    torch._dynamo.reset()
    for layer in decoder_layers(model):
        layer.compile(fullgraph=True, backend="aot_eager")
    probe = make_probe(model)
    torch.testing.assert_close(model(**probe).logits, plain(**probe).logits)
    model(**probe).logits.sum().backward()
    assert all(evidence.acted for evidence in pipeline.attention.verify(PreparedModel(model), probe))
    torch._dynamo.reset()


def test_float32_weights_under_autocast_compute_in_its_dtype(monkeypatch):
    """The kernels have no float32, in training and in verify()."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    pipeline, model = using("flash4"), unchecked("flash4", "llama")
    pipeline.precision.enabled, pipeline.precision.autocast = True, Autocast.bfloat16
    seen = set()
    original = flash4.attend

    def spy(q, k, v, *rest):
        seen.update((q.dtype, k.dtype, v.dtype))
        return original(q, k, v, *rest)

    monkeypatch.setitem(
        ALL_ATTENTION_FUNCTIONS, FLASH4.implementation, packed_attention._attention_function(spy, True)
    )
    pipeline.prove(PreparedModel(model), make_probe(model))
    with pipeline.precision.context(torch.device("cpu")):
        model(**make_probe(model)).logits.sum().backward()
    assert seen == {torch.bfloat16}


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral_sliding", "gemma3"])
def test_generated_answers_equal_eager(family):
    """Generation has a cache and prompts padded on the left, which the kernel does not take."""
    prompts = [[5, 9, 2, 77, 31], [8], [100, 3, 3, 64, 12, 90, 41, 7, 6], [11, 12]]
    given = [
        answer(
            PreparedModel(unchecked(backend, family).eval()),
            TOKENIZER,
            [Question("?", prompt, "!") for prompt in prompts],
            3,
            6,
        )
        for backend in ("eager", "flash4")
    ]
    assert given[0] == given[1]
    assert len(set(given[0])) > 1


def test_a_saved_model_loads_in_plain_transformers(tmp_path):
    from transformers import AutoModelForCausalLM

    model = unchecked("flash4", "llama")
    save_model(
        PreparedModel(model),
        TOKENIZER,
        tmp_path / "saved",
        card={"data": "", "figures": {}, "machine": Facts.of(CPU.facts()), "config": {}},
    )
    assert "fxtune" not in (tmp_path / "saved" / "config.json").read_text()
    assert "attn_implementation" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert loaded.config._attn_implementation == "sdpa"


def test_packing_is_refused_for_layers_that_carry_state_and_cannot_be_separated():
    rwkv = {"model_type": "rwkv", "hidden_size": 64, "attention_hidden_size": 64, "num_hidden_layers": 2}
    reason = list(Attention(enabled=True).check(Facts(model=rwkv, packing=True)))
    assert "in rwkv of transformers, documents in one row see each other, because of its recurrent layers" in reason[0]
    assert "data.packing=false" in reason[0]
    assert not list(Attention(enabled=True).check(Facts(model=rwkv, packing=False)))


@pytest.mark.parametrize(("kind", "refused"), [("qwen3_next", True), ("llama", False)])
def test_a_recurrent_model_is_refused_where_fla_core_is_installed_and_does_not_work(kind, refused):
    facts = facts_of(tiny_model(kind), device="cuda", broken={"fla-core": "RuntimeError: install tilelang"})
    assert any("install tilelang" in reason for reason in Attention(enabled=True).check(facts)) == refused


def test_packing_is_refused_where_queries_are_scaled_by_their_place_in_a_row():
    def reasons(tokens: int) -> list[str]:
        model = tiny_model("llama4_text")
        model.architecture["floor_scale"] = 32
        return [why for why in Attention().check(facts_of(model, sequence_length=tokens)) if "floor_scale=32" in why]

    assert reasons(32) == []
    assert len(reasons(33)) == 1


def test_verify_finds_another_kernel():
    pipeline = using("sdpa")
    prepared = prepared_model(pipeline, random_model("llama"))
    model = prepared.module
    model.set_attn_implementation("eager")
    with pytest.raises(ConfigError, match="seen: 2 calls of plain operations in 2 layers"):
        pipeline.prove(prepared, make_probe(model))


def test_verify_finds_documents_that_see_each_other(monkeypatch):
    """A library that ignores position_ids has one causal mask over the whole row."""
    from transformers.models.llama import modeling_llama

    pipeline = Pipeline()
    prepared = prepared_model(pipeline, random_model("llama"))
    model = prepared.module
    proven = modeling_llama.create_causal_mask
    monkeypatch.setattr(
        modeling_llama, "create_causal_mask", lambda **arguments: proven(**{**arguments, "position_ids": None})
    )
    with pytest.raises(ConfigError, match="asked for packed documents do not see each other"):
        pipeline.prove(prepared, make_probe(model))
    monkeypatch.undo()
    pipeline.prove(prepared, make_probe(model))


def test_verify_finds_bounds_that_join_documents():
    """A kernel that receives the whole row as one document."""
    pipeline = using("flash4")
    model = unchecked("flash4", "llama")
    probe = make_probe(model)
    pipeline.prove(PreparedModel(model), probe)
    with pytest.raises(ConfigError, match="asked for packed documents do not see each other"):
        pipeline.prove(
            PreparedModel(model), {**probe, "cu_seq_lens_q": torch.tensor([0, 24, 24, 24], dtype=torch.int32)}
        )


def test_verify_finds_positions_that_do_not_separate_documents():
    """BLOOM places tokens by its attention mask, not by position_ids."""
    pipeline = Pipeline()
    prepared = prepared_model(
        pipeline,
        models.ModelConfig(
            path=None,
            init=random_model("llama").init,
            architecture={"model_type": "bloom", "hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128},
        ),
    )
    model = prepared.module
    with pytest.raises(ConfigError, match="do not see each other"):
        pipeline.prove(prepared, make_probe(model))


def test_verify_keeps_the_mode_and_the_random_state():
    pipeline = Pipeline()
    prepared = prepared_model(pipeline, random_model("llama"))
    model = prepared.module.train()
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    pipeline.verify(prepared, make_probe(model))
    assert torch.equal(torch.rand(2), expected)
    assert model.training
