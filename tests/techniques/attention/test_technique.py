"""Attention: the kernel of the recipe runs, and packed documents do not see each other.

The kernels need a GPU (tests/gpu/test_attention.py). The code around them is tested here: flash4's operator has a CPU
implementation, and the requirements of each kernel are checked with invented machines.
"""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.architectures import CPU, FAMILIES, built, enable, facts_of, random_model, word_tokenizer
from torch.nn import functional as F

from fxtune.data.batches.batch import BatchSpec, build_batch
from fxtune.errors import ConfigError
from fxtune.models import load as models
from fxtune.models.load import load_config
from fxtune.models.save import save_model
from fxtune.models.structure import decoder_layers
from fxtune.system.facts import PACKAGES
from fxtune.techniques.attention import packed as packed_attention
from fxtune.techniques.attention.backends import BACKENDS
from fxtune.techniques.attention.inputs import model_inputs
from fxtune.techniques.attention.technique import Attention
from fxtune.techniques.facts import Facts
from fxtune.techniques.pipeline import Pipeline, make_probe
from fxtune.techniques.precision import Autocast
from fxtune.training.answers import Question, answer

GB = 2**30
H200 = Facts(
    device="cuda",
    device_name="NVIDIA H200",
    capability=(9, 0),
    memory=140 * GB,
    dtype="bfloat16",
    packing=True,
    sequence_length=65536,
    rows=(65536,),
    packages={**dict.fromkeys(PACKAGES, "1.0"), "flash-attn-4": "4.0.0b36"},
)
A100 = replace(H200, device_name="NVIDIA A100", capability=(8, 0))
SHAPE = {"hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 131072}
SINKS = {"head_dim": 64, "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
TOKENIZER = word_tokenizer(eos_token="t1", unk_token="t0", pad_token="t0")


def using(backend: str) -> Pipeline:
    pipeline = Pipeline()
    pipeline.attention.backend = backend
    return pipeline


def unchecked(backend: str, family: str, **changes):
    """A model with a backend that check() refuses on a CPU. Its operator has a reference implementation there."""
    model = random_model(family, **changes)
    return using(backend).build(model, load_config(model), CPU, 0)


def machine(base: Facts = H200, kind: str = "llama", changes: dict | None = None, **known) -> Facts:
    """Facts of a model of this kind on a machine."""
    from transformers import AutoConfig

    return replace(base, model=AutoConfig.for_model(kind, **{**SHAPE, **(changes or {})}).to_dict(), **known)


def reasons(backend: str, facts: Facts, **options) -> str:
    return "\n".join(Attention(enabled=True, backend=backend, **options).check(facts))


def chosen(facts: Facts) -> tuple[str, str]:
    attention = Attention(enabled=True)
    assert not list(attention.check(facts))
    note = attention.resolve(facts)
    assert not list(attention.check(facts))
    return attention.backend, note


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gemma2"])
def test_each_backend_isolates_documents_in_every_family(family, backend):
    pipeline = using(backend)
    model = built(pipeline, random_model(family))
    kernel, isolation = pipeline.attention.verify(model, make_probe(model))
    assert kernel.acted, kernel
    assert kernel.asked.startswith(backend)
    assert kernel.observed.startswith("2 calls of ")
    assert isolation.acted, isolation


@pytest.mark.parametrize("backend", ["auto", "flash4"])
@pytest.mark.parametrize("family", FAMILIES)
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
        batch = build_batch([type("Table", (), {"ids": ids, "supervised": ids > 0})], pieces)
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
    kernel, isolation = using("flash4").attention.verify(model, make_probe(model))
    assert kernel.acted
    assert kernel.observed == "2 calls of FlashAttention-4 in 2 layers"
    assert isolation.acted
    assert not next(iter(using("sdpa").attention.verify(model, make_probe(model)))).acted


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
    assert all(evidence.acted for evidence in pipeline.attention.verify(model, probe))
    torch._dynamo.reset()


def test_float32_weights_under_autocast_compute_in_its_dtype(monkeypatch):
    """The kernels have no float32, in training and in verify()."""
    from transformers import AttentionInterface

    pipeline, model = using("flash4"), unchecked("flash4", "llama")
    pipeline.precision.enabled, pipeline.precision.autocast = True, Autocast.bfloat16
    seen = set()
    original = packed_attention._by_flash4

    def spy(q, k, v, *rest):
        seen.update((q.dtype, k.dtype, v.dtype))
        return original(q, k, v, *rest)

    registered = AttentionInterface._global_mapping
    monkeypatch.setitem(registered, packed_attention.FLASH4, packed_attention._attention_function(spy))
    pipeline.prove(model, make_probe(model))
    with pipeline.precision.context(torch.device("cpu")):
        model(**make_probe(model)).logits.sum().backward()
    assert seen == {torch.bfloat16}


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral_sliding", "gemma3"])
def test_generated_answers_equal_eager(family):
    """Generation has a cache and prompts padded on the left, which the kernel does not take."""
    prompts = [[5, 9, 2, 77, 31], [8], [100, 3, 3, 64, 12, 90, 41, 7, 6], [11, 12]]
    given = [
        answer(unchecked(backend, family).eval(), TOKENIZER, [Question("?", prompt, "!") for prompt in prompts], 3, 6)
        for backend in ("eager", "flash4")
    ]
    assert given[0] == given[1]
    assert len(set(given[0])) > 1


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral_sliding"])
def test_a_plain_call_with_packed_positions_isolates_documents(family):
    """In a user's forward pass without cu_seqlens, transformers builds the mask."""
    models = [unchecked(backend, family).eval() for backend in ("eager", "flash4")]
    probe = {name: make_probe(models[0])[name] for name in ("input_ids", "position_ids", "use_cache")}
    with torch.no_grad():
        torch.testing.assert_close(models[1](**probe).logits, models[0](**probe).logits)


@pytest.mark.parametrize(
    ("implementation", "given"),
    [
        ("sdpa", False),
        ("flex_attention", False),
        ("fxtune_fa4", True),
        ("flash_attention_3", True),
        ("org/kernel@0", True),
    ],
)
def test_which_backends_receive_cu_seqlens(implementation, given):
    """transformers would find the documents of one row, but not of two."""
    model = torch.nn.Identity()
    model.config = type("Config", (), {"_attn_implementation": implementation})
    rows, bounds = torch.zeros(2, 5, dtype=torch.long), torch.tensor([0, 5, 10], dtype=torch.int32)
    inputs = model_inputs(model, rows, rows, bounds)
    assert ("cu_seq_lens_q" in inputs) == given
    assert ("attention_mask" in inputs) == implementation.startswith("fxtune")
    if given:
        assert inputs["cu_seq_lens_k"] is bounds
        assert inputs["max_length_q"] == 5


def test_a_layer_that_drops_cu_seqlens_is_an_error():
    model = unchecked("flash4", "llama")
    probe = {name: value for name, value in make_probe(model).items() if not name.startswith(("cu_", "max_"))}
    with pytest.raises(ConfigError, match="does not pass the documents' bounds"):
        model(**probe)


@pytest.mark.parametrize(
    ("what", "match"),
    [({"s_aux": torch.zeros(4)}, "sinks"), ({"dropout": 0.1}, "no dropout"), ({"is_causal": False}, "is not causal")],
)
def test_unsupported_arguments_of_the_kernel_are_errors(what, match):
    from transformers import AttentionInterface

    packed_attention.register()
    qkv = torch.zeros(3, 1, 4, 6, 8)
    with pytest.raises(ConfigError, match=match):
        AttentionInterface()["fxtune_fa4"](
            torch.nn.Identity(),
            *qkv,
            packed_attention.no_mask(torch.zeros(1, 6)),
            cu_seq_lens_q=torch.tensor([0, 6], dtype=torch.int32),
            **what,
        )


def test_a_saved_model_loads_in_plain_transformers(tmp_path):
    from transformers import AutoModelForCausalLM

    model = unchecked("flash4", "llama")
    save_model(
        model, TOKENIZER, tmp_path / "saved", card={"data": "", "figures": {}, "facts": Facts.of(CPU), "config": {}}
    )
    assert "fxtune" not in (tmp_path / "saved" / "config.json").read_text()
    assert "attn_implementation" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert loaded.config._attn_implementation == "sdpa"


def test_cudnn_runs_packed_rows_document_by_document(monkeypatch):
    """The loop over documents, with torch's attention in place of cuDNN's."""
    lengths = []

    def rows(q, k, v, scale):
        lengths.append(q.shape[1])
        return F.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, scale=scale, enable_gqa=True
        ).transpose(1, 2)

    monkeypatch.setattr(packed_attention, "_cudnn_rows", rows)
    packed_attention.register()
    q, k, v = (torch.randn(2, 80, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    cu_seqlens = torch.tensor([0, 1, 70, 80, 159, 160, 160, 160], dtype=torch.int32)
    out = packed_attention._by_cudnn(q, k, v, cu_seqlens, 0.3, 0, 0.0)
    expected = packed_attention._by_flash4(q, k, v, cu_seqlens, 0.3, 0, 0.0)
    torch.testing.assert_close(out, expected)
    for ours, theirs in zip(
        torch.autograd.grad(out.sin().sum(), (q, k, v)),
        torch.autograd.grad(expected.sin().sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)
    assert lengths == [64, 128, 64, 128, 64]


@given(st.integers(1, 2**20))
def test_cudnn_pads_to_few_lengths(length):
    padded = packed_attention.cudnn_length(length)
    assert padded >= length
    assert padded == packed_attention.cudnn_length(padded)
    assert padded - length < max(64, length / packed_attention.CUDNN_STEPS * 1.01)


def test_torch_flash_attention_is_called_by_its_schema():
    """On torch's meta device: the operator's arguments and shapes, without its kernel."""
    q, k, v = (torch.randn(2, 80, heads, 16, device="meta", dtype=torch.bfloat16) for heads in (4, 2, 2))
    cu_seqlens = torch.empty(9, dtype=torch.int32, device="meta")
    for window in (0, 5):
        assert packed_attention._by_torch(q, k, v, cu_seqlens, 0.3, window, 0.0).shape == (2, 80, 4, 16)
    assert packed_attention._by_torch(q, k, v[..., :8], cu_seqlens, 0.3, 0, 0.0).shape == (2, 80, 4, 8)
    assert packed_attention._cudnn_rows(q, k, v, 0.3).shape == (2, 80, 4, 16)


def test_auto_is_sdpa_on_a_cpu_and_eager_with_a_soft_cap():
    for family, expected in (("llama", "sdpa"), ("gemma2", "eager")):
        pipeline, notes = Pipeline().resolved(facts_of(random_model(family)))
        assert pipeline.attention.backend == expected
        assert any(f"auto chose {expected}" in note for note in notes)
        model = built(pipeline, random_model(family))
        kernel, isolation = pipeline.attention.verify(model, make_probe(model))
        assert kernel.acted
        assert isolation.acted


@pytest.mark.parametrize(
    ("facts", "expected", "passed"),
    [
        (dict(), "flash4", ""),
        (dict(packages={}), "sdpa", "flash3 needs the package flash-attn-3; cudnn runs packed rows document"),
        (dict(packages={}, packing=False), "cudnn", "flash4 needs the package"),
        (dict(base=A100), "flash2", "flash4 does not support NVIDIA A100 (compute capability 8.0"),
        (dict(base=A100, packages={}), "sdpa", "flash2 needs the package flash-attn"),
        (dict(dtype="float32", packages={}), "flex", "sdpa would build a mask of 4.0 GiB"),
        (
            dict(dtype="float32", sequence_length=4096),
            "sdpa",
            "flash4 computes in float16 and bfloat16, not in float32",
        ),
        (dict(kind="gemma2"), "flash4", ""),
        (dict(kind="gemma2", packages={}), "flex", "sdpa does not support gemma2's soft cap"),
        (dict(changes={"attention_dropout": 0.1}), "flash2", "flash4 does not support llama's dropout"),
        (dict(changes={"head_dim": 512}, sequence_length=4096), "sdpa", "flash4 takes heads of 8 to 256"),
        (dict(kind="gpt_oss", changes=SINKS), "flex", "flash4 does not support gpt_oss's attention sinks"),
    ],
    ids=lambda value: value if isinstance(value, str) else "on",
)
def test_auto_is_the_fastest_correct_backend(facts, expected, passed):
    backend, note = chosen(machine(**facts))
    assert backend == expected
    assert f"auto chose {expected}" in note
    assert passed in note


@pytest.mark.parametrize(
    ("backend", "facts", "match"),
    [
        (
            "flash4",
            dict(dtype="float32"),
            "flash4 computes in float16 and bfloat16, not in float32. Set model.dtype=bfloat16",
        ),
        ("cudnn", dict(dtype="float32"), "not in float32"),
        (
            "flash3",
            dict(base=A100),
            "flash3 does not support NVIDIA A100 (compute capability 8.0; it supports 9.0 to below 10.0)",
        ),
        ("flash3", dict(capability=(10, 0)), "flash3 does not support"),
        ("flash4", dict(base=A100), "flash4 does not support NVIDIA A100"),
        (
            "flash4",
            dict(packages={}),
            "flash4 needs the package flash-attn-4. Install it: pip install 'fxtune[flash]'",
        ),
        (
            "flash4",
            dict(packages={"flash-attn-4": "4.0.0b99"}),
            "needs flash-attn-4 4.0.0b36, and 4.0.0b99 is installed",
        ),
        ("flash2", dict(packages={}), "pip install flash-attn"),
        ("flash3", dict(packages={}), "needs the package flash-attn-3"),
        ("flash4", dict(changes={"head_dim": 512}), "flash4 takes heads of 8 to 256 in steps of 8 here"),
        ("flash4", dict(changes={"head_dim": 20}), "have 20"),
        ("flash4", dict(capability=(10, 0), changes={"head_dim": 192}), "have 192"),
        ("cudnn", dict(changes={"head_dim": 256}), "cudnn takes heads of up to 128"),
        ("flash4", dict(changes={"attention_dropout": 0.1}), "does not support llama's dropout in attention (0.1)"),
        ("flash3", dict(changes={"attention_dropout": 0.1}), "dropout"),
        ("flex", dict(changes={"attention_dropout": 0.1}), "dropout"),
        ("sdpa", dict(kind="gemma2"), "sdpa does not support gemma2's soft cap on attention scores (50.0)"),
        ("cudnn", dict(kind="gemma2"), "soft cap"),
        (
            "cudnn",
            dict(kind="mistral", changes={"sliding_window": 4096}),
            "does not support mistral's sliding window (4096)",
        ),
        ("cudnn", dict(techniques=enable(compile={"fullgraph": True})), "techniques.compile.fullgraph=false"),
        ("cudnn", dict(deterministic=True), "run.deterministic=false"),
        ("flash4", dict(capability=(12, 0), deterministic=True), "no deterministic backward"),
        ("sdpa", dict(kind="gpt_oss", changes=SINKS), "does not support gpt_oss's attention sinks"),
        ("flash4", dict(kind="bloom", changes={"n_head": 8}), "flash4 is not available for bloom in transformers"),
        ("sdpa", dict(dtype="float32"), "sdpa would build a mask of 4.0 GiB for packed rows of 65536 tokens"),
        ("eager", dict(), "eager stores the scores of each layer"),
        ("flash4", dict(base=Facts()), "flash4 needs a GPU, and this run is on a CPU"),
        ("flash", dict(), "there is no flash. Did you mean flash"),
        ("nonsense", dict(), "There are auto, flash4, flash3"),
        ("hub:kernels-community/flash-attn3", dict(), "is not pinned"),
        ("hub:kernels-community/flash-attn3", dict(), "trust_remote_code: false"),
        (
            "hub:kernels-community/flash-attn3",
            dict(packages={}),
            "needs the package kernels. Install it: pip install kernels",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "on",
)
def test_a_backend_names_what_it_does_not_support(backend, facts, match):
    assert match in reasons(backend, machine(**facts))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_accepts_what_it_supports(backend):
    """Whole rows of 4,096 tokens on a Hopper card with every package."""
    assert not reasons(backend, machine(packing=False, sequence_length=4096))
    assert not reasons("hub:kernels-community/flash-attn3@" + "0" * 40, machine(), trust_remote_code=True)


def test_flash4_accepts_float32_weights_under_autocast():
    pipeline = using("flash4")
    pipeline.precision.enabled, pipeline.precision.autocast = True, Autocast.bfloat16
    assert not reasons("flash4", machine(dtype="float32", techniques=pipeline))


def test_flash4_refuses_chunked_attention():
    chunked = {
        "model_type": "llama4_text",
        "layer_types": ["chunked_attention"],
        "attention_chunk_size": 8192,
        **SHAPE,
    }
    assert "no chunked attention" in reasons("flash4", replace(H200, model=chunked))
    assert "chunked" not in reasons("flash4", replace(H200, model=chunked, sequence_length=4096))


def test_sdpa_on_a_gpu_is_flash_attention_over_documents():
    pipeline = using("sdpa")
    pipeline.attention.resolve(machine())
    config = copy.deepcopy(load_config(random_model("llama")))
    pipeline.attention.configure(config)
    assert config._attn_implementation == "fxtune_sdpa"


def test_packing_is_refused_for_layers_that_carry_state():
    hybrid = {"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"]}
    reason = list(Attention(enabled=True).check(Facts(model=hybrid, packing=True)))
    assert "linear_attention layers of qwen3_next" in reason[0]
    assert "data.packing=false" in reason[0]
    assert not list(Attention(enabled=True).check(Facts(model=hybrid, packing=False)))


def test_verify_finds_another_kernel():
    pipeline = using("sdpa")
    model = built(pipeline, random_model("llama"))
    model.set_attn_implementation("eager")
    with pytest.raises(ConfigError, match="seen: 2 calls of plain operations in 2 layers"):
        pipeline.prove(model, make_probe(model))


def test_verify_finds_documents_that_see_each_other(monkeypatch):
    """A library that ignores position_ids has one causal mask over the whole row."""
    from transformers.models.llama import modeling_llama

    pipeline = Pipeline()
    model = built(pipeline, random_model("llama"))
    proven = modeling_llama.create_causal_mask
    monkeypatch.setattr(
        modeling_llama, "create_causal_mask", lambda **arguments: proven(**{**arguments, "position_ids": None})
    )
    with pytest.raises(ConfigError, match="asked for packed documents do not see each other"):
        pipeline.prove(model, make_probe(model))
    monkeypatch.undo()
    pipeline.prove(model, make_probe(model))


def test_verify_finds_bounds_that_join_documents():
    """A kernel that receives the whole row as one document."""
    pipeline = using("flash4")
    model = unchecked("flash4", "llama")
    probe = make_probe(model)
    pipeline.prove(model, probe)
    with pytest.raises(ConfigError, match="asked for packed documents do not see each other"):
        pipeline.prove(model, {**probe, "cu_seq_lens_q": torch.tensor([0, 24, 24, 24], dtype=torch.int32)})


def test_verify_finds_positions_that_do_not_separate_documents():
    """BLOOM places tokens by its attention mask, not by position_ids."""
    pipeline = Pipeline()
    model = built(
        pipeline,
        models.ModelConfig(
            path=None,
            init=random_model("llama").init,
            architecture={"model_type": "bloom", "hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128},
        ),
    )
    with pytest.raises(ConfigError, match="do not see each other"):
        pipeline.prove(model, make_probe(model))


def test_verify_keeps_the_mode_and_the_random_state():
    pipeline = Pipeline()
    model = built(pipeline, random_model("llama")).train()
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    pipeline.verify(model, make_probe(model))
    assert torch.equal(torch.rand(2), expected)
    assert model.training
