"""The table of attention backends: what each supports, and which is the fastest correct one."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
from support.architectures import enable, facts_of, prepared_model, random_model
from support.attention import using

from fxtune.facts.options import Autocast
from fxtune.facts.run import Facts
from fxtune.models.load import load_config
from fxtune.system.machine.facts import PACKAGES
from fxtune.techniques.attention.backends.registry import BACKENDS
from fxtune.techniques.attention.technique import Attention
from fxtune.techniques.pipeline import Pipeline, make_probe

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
    packages={**dict.fromkeys(PACKAGES, "0.1"), "flash-attn-4": "4.0.0b36"},
)
A100 = replace(H200, device_name="NVIDIA A100", capability=(8, 0))
SHAPE = {"hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 131072}
SINKS = {"head_dim": 64, "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}


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


def test_auto_is_sdpa_on_a_cpu_and_eager_with_a_soft_cap():
    for family, expected in (("llama", "sdpa"), ("gemma2", "eager")):
        pipeline, notes = Pipeline().resolved(facts_of(random_model(family)))
        assert pipeline.attention.backend == expected
        assert any(f"auto chose {expected}" in note for note in notes)
        prepared = prepared_model(pipeline, random_model(family))
        model = prepared.module
        kernel, isolation = pipeline.attention.verify(prepared, make_probe(model))
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
        (dict(kind="gpt_oss", changes=SINKS), "flash4", ""),
        (dict(kind="gpt_oss", changes=SINKS, base=A100), "flex", "sdpa does not support gpt_oss's attention sinks"),
        (dict(kind="gpt_oss", changes=SINKS, capability=(12, 0)), "flex", "attention sinks on this GPU"),
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
        "num_hidden_layers": 1,
    }
    assert "no chunked attention" in reasons("flash4", replace(H200, model=chunked))
    assert "chunked" not in reasons("flash4", replace(H200, model=chunked, sequence_length=4096))


def test_sdpa_on_a_gpu_is_flash_attention_over_documents():
    pipeline = using("sdpa")
    pipeline.attention.resolve(machine())
    config = copy.deepcopy(load_config(random_model("llama")))
    pipeline.attention.configure(config)
    assert config._attn_implementation == "fxtune_sdpa"


def test_images_whose_tokens_see_each_other_need_a_backend_with_masks():
    """Known when the data is read, so rows of text alone may run on any backend."""
    facts = machine(packages={"flash-attn-3": "1.0"}, kind="gemma3_text", images_see_both_ways=True)
    assert chosen(facts)[0] == "flash3"
    assert not reasons("flash3", facts)
    with_images = replace(facts, image_features=256)
    assert chosen(with_images)[0] == "sdpa"
    for backend in ("flash3", "flex"):
        assert "whose tokens see each other. Use sdpa" in reasons(backend, with_images)
    assert not reasons("sdpa", with_images)
    assert not reasons("flash3", replace(with_images, images_see_both_ways=False))
