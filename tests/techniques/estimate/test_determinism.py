"""The forecast of what deterministic kernels cost, by card, backend, head size and length."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.forecasts import LLAMA, TECHNIQUES, card

from fxtune.techniques.estimate.determinism import cost


def of(length: int = 4096, backend: str = "flash4", dtype: str = "bfloat16", **known) -> float | None:
    precision = {"autocast": "none"} if dtype == "float32" else TECHNIQUES["precision"]
    techniques = {**TECHNIQUES, "attention": {"backend": backend}, "precision": precision}
    return cost(card(139, length, dtype=dtype, techniques=techniques, **known))


def test_longer_rows_cost_more_of_a_step():
    short, long = of(4096), of(65536)
    assert 0 < short < 0.02 < long


def test_kernels_with_one_order_cost_nothing():
    assert of(backend="eager") == of(backend="flex") == 0


def test_a_slower_kernel_in_place_of_cudnn_counts():
    assert of(backend="cudnn") > 3 * of(backend="flash4")


@pytest.mark.parametrize(
    "known",
    [
        {"device_name": "NVIDIA A100-SXM4-80GB"},
        {"length": 131072},
        {"backend": "flash3"},
        {"model": {**LLAMA, "num_attention_heads": 8, "head_dim": 512}},
        {"backend": "sdpa", "dtype": "float32", "length": 65536},
    ],
    ids=["card", "length", "backend", "heads", "dtype"],
)
def test_what_is_not_measured_has_no_cost(known):
    assert of(**known) is None


def test_disabled_attention_runs_sdpa():
    facts = card(139, 4096)
    off = replace(facts.techniques, attention=replace(facts.techniques.attention, enabled=False))
    assert cost(replace(facts, techniques=off)) == pytest.approx(of(backend="sdpa"))
