"""Tests of the GPU tests' references on a CPU: fxtune in float32 equals plain transformers in float32."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import torch
from support import image_reference, reference
from support.cases import slow_but

from fxtune.techniques.pipeline import Pipeline

LENGTHS = (23, 40, 7)


def given(shape: str, **options):
    return reference.batch(reference.small(shape), LENGTHS, device="cpu", **options)


@pytest.mark.parametrize("shape", slow_but(reference.SHAPES, "llama", "gemma", mark=pytest.mark.vital))
def test_fxtune_equals_plain_transformers_document_by_document(shape):
    tokens = given(shape, padding=5)
    result = reference.ours(Pipeline(), reference.small(shape), tokens, dtype="float32")
    expected = reference.plain(reference.small(shape), tokens)
    assert set(expected.grads) == set(reference.weights(reference.small(shape)))
    assert expected.logits.shape == (tokens.supervised, 128)
    assert max(reference.relative_errors(result, expected).values()) < reference.LIMITS["float32"]
    assert result.evidence


@pytest.mark.vital
def test_fxtune_with_adapters_equals_plain_peft_including_gradients():
    tokens = given("llama", rows=2)
    result = reference.ours(Pipeline(), reference.small("llama"), tokens, dtype="float32", lora=True)
    expected = reference.plain(reference.small("llama"), tokens, lora=True)
    assert len(expected.grads) == 2 * 2 * 7
    assert all(gradient.norm() > 0 for gradient in expected.grads.values()), "A has no gradient if B is zero"
    assert max(reference.relative_errors(result, expected).values()) < reference.LIMITS["float32"]


@pytest.mark.vital
def test_comparison_detects_other_dtype_and_attention_across_documents():
    """A model in another dtype, and tokens that attend to other documents, both exceed the limit for float32."""
    tokens = given("llama")
    expected = reference.plain(reference.small("llama"), tokens)
    half = reference.plain(reference.small("llama"), tokens, dtype="bfloat16")
    leaking = reference.plain(
        reference.small("llama"), reference.batch(reference.small("llama"), (sum(LENGTHS),), device="cpu")
    )
    assert reference.relative(half.logits, expected.logits) > 1e-3
    assert abs(leaking.loss - expected.loss) > 1e-3
    assert reference.relative(torch.tensor([1.0, float("nan")]), torch.ones(2)) == float("inf")


@pytest.mark.parametrize("family", slow_but(image_reference.FAMILIES, "qwen2_5_vl", "gemma3", mark=pytest.mark.vital))
def test_fxtune_on_packed_documents_with_images_equals_plain_transformers(family):
    result, made = image_reference.ours(Pipeline(), family, "cpu", "float32")
    expected = image_reference.plain(family, "cpu")
    assert any("vision" in name or "visual" in name for name in expected.grads)
    errors = reference.relative_errors(result, expected)
    assert max(errors.values()) < reference.LIMITS["float32"], errors
    own, others = image_reference.isolation(*made, family, "cpu")
    assert own > 1e-3
    assert others == 0


@pytest.mark.slow
def test_adapters_with_images_equal_plain_peft():
    pipeline = Pipeline()
    pipeline.lora.vision = pipeline.lora.projector = True
    result, _ = image_reference.ours(pipeline, "qwen2_5_vl", "cpu", "float32", lora=True)
    modules = image_reference.adapted(result)
    assert {"vision" in name or "visual" in name for name in modules} == {True, False}
    expected = image_reference.plain("qwen2_5_vl", "cpu", adapted=modules)
    assert max(reference.relative_errors(result, expected).values()) < reference.LIMITS["float32"]


def test_batch_has_the_layout_of_the_data_plan():
    tokens = given("llama", rows=2, padding=5)
    assert tokens.input_ids.shape == (2, sum(LENGTHS) + 5)
    assert tokens.cu_seqlens.tolist()[:10] == [0, 23, 63, 70, 75, 98, 138, 145, 150, 150]
    assert 0.4 < tokens.supervised / tokens.tokens < 0.6
    assert torch.equal(tokens.targets.flatten()[tokens.supervised_at], tokens.labels)


@pytest.mark.parametrize(
    ("worker", "visible", "count", "assigned"),
    [
        ("gw0", None, 2, "0"),
        ("gw3", None, 2, "1"),
        ("gw1", "5,7", 2, "7"),
        ("gw2", "GPU-a, GPU-b", 2, "GPU-a"),
        (None, None, 2, None),
        (None, "5,7", 2, "5,7"),
        ("gw3", None, 1, None),
        ("gw3", "5", 1, "5"),
        ("gw1", None, 0, None),
    ],
)
def test_each_xdist_worker_uses_its_own_gpu(monkeypatch, worker, visible, count, assigned):
    spec = importlib.util.spec_from_file_location(
        "gpu_conftest", Path(reference.__file__).parents[1] / "gpu" / "conftest.py"
    )
    conftest = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conftest)
    for name, value in (("PYTEST_XDIST_WORKER", worker), ("CUDA_VISIBLE_DEVICES", visible)):
        monkeypatch.setenv(name, value or "")
        if value is None:
            monkeypatch.delenv(name)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    conftest.assign_gpu()
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == assigned
