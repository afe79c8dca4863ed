"""The references of tests/gpu, checked where there is no GPU: fxtune in float32 is plain transformers in float32."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import torch
from support import reference

from fxtune.techniques.pipeline import Pipeline

LENGTHS = (23, 40, 7)


def given(shape: str, **options):
    return reference.batch(reference.small(shape), LENGTHS, device="cpu", **options)


@pytest.mark.parametrize("shape", reference.SHAPES)
def test_ours_is_plain_transformers_document_by_document(shape):
    tokens = given(shape, padding=5)
    seen = reference.ours(Pipeline(), reference.small(shape), tokens, dtype="float32")
    wanted = reference.plain(reference.small(shape), tokens)
    assert set(wanted.grads) == set(reference.weights(reference.small(shape)))
    assert wanted.logits.shape == (tokens.supervised, 128)
    assert max(reference.apart(seen, wanted).values()) < reference.LIMITS["float32"]
    assert seen.evidence


def test_with_adapters_too_and_their_gradients_are_all_there():
    tokens = given("llama", rows=2)
    seen = reference.ours(Pipeline(), reference.small("llama"), tokens, dtype="float32", lora=True)
    wanted = reference.plain(reference.small("llama"), tokens, lora=True)
    assert len(wanted.grads) == 2 * 2 * 7
    assert all(gradient.norm() > 0 for gradient in wanted.grads.values()), "A learns nothing where B is zero"
    assert max(reference.apart(seen, wanted).values()) < reference.LIMITS["float32"]


def test_what_is_compared_can_differ():
    """Another dtype, tokens that see other documents: both are far outside of the limit for float32."""
    tokens = given("llama")
    wanted = reference.plain(reference.small("llama"), tokens)
    half = reference.plain(reference.small("llama"), tokens, dtype="bfloat16")
    leaking = reference.plain(
        reference.small("llama"), reference.batch(reference.small("llama"), (sum(LENGTHS),), device="cpu")
    )
    assert reference.relative(half.logits, wanted.logits) > 1e-3
    assert abs(leaking.loss - wanted.loss) > 1e-3
    assert reference.relative(torch.tensor([1.0, float("nan")]), torch.ones(2)) == float("inf")


def test_a_batch_is_as_the_data_plan_makes_it():
    tokens = given("llama", rows=2, padding=5)
    assert tokens.input_ids.shape == (2, sum(LENGTHS) + 5)
    assert tokens.cu_seqlens.tolist()[:10] == [0, 23, 63, 70, 75, 98, 138, 145, 150, 150]
    assert 0.4 < tokens.supervised / tokens.tokens < 0.6
    assert torch.equal(tokens.targets.flatten()[tokens.supervised_at], tokens.labels)


@pytest.mark.parametrize(
    ("worker", "visible", "count", "taken"),
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
def test_each_worker_of_the_card_tests_takes_its_own_card(monkeypatch, worker, visible, count, taken):
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
    conftest.take_a_card()
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == taken
