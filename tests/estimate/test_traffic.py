"""What ranks send, and what they hold to send it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.architectures import enable
from support.forecasts import LLAMA, TECHNIQUES, card

from fxtune.distributed.parallel import Degrees
from fxtune.estimate.memory import forecast
from fxtune.estimate.traffic import step_traffic
from fxtune.facts.recomputation import RecomputePlan
from fxtune.settle.degrees import memory_need

TRIED = {**TECHNIQUES, "lora": {"r": 16, "target_modules": ["all-linear"]}, "checkpointing": {"policy": "auto"}}
FULL = enable(compile={}, liger={"kernels": ["fused_linear_cross_entropy"]}, checkpointing={"policy": "full"})
ADAPTERS = 41_943_040
"""Rank-16 adapters on all linears of the 8B shape."""


def test_parts_of_weights_and_rows_take_their_share_of_memory():
    one = card(139, 8192, techniques={})
    one = replace(one, techniques=FULL)
    plan = RecomputePlan("input")
    whole, half = (forecast(replace(one, degrees=degrees), plan) for degrees in (Degrees(), Degrees(shard=2)))
    assert half.weights == pytest.approx(whole.weights / 2, abs=1)
    assert half.trained == pytest.approx(whole.trained / 2, abs=1)
    assert (half.kept, whole.exchange) == (whole.kept, 0)
    assert half.backward < whole.backward  # with half of the gradients
    rows = forecast(replace(one, degrees=Degrees(context=2)), plan)
    assert (rows.kept, rows.weights) == (whole.kept // 2, whole.weights)


def test_what_ranks_send():
    facts = card(139, 4096, techniques=TRIED)
    assert step_traffic(facts).total == 0
    two = step_traffic(replace(facts, degrees=Degrees(replicate=2)), micro_batches=8)
    assert (two.gradients, two.total) == (4 * ADAPTERS, 4 * ADAPTERS)  # 168 MB, once a step
    assert step_traffic(replace(facts, degrees=Degrees(replicate=4))).gradients == 6 * ADAPTERS
    full = replace(facts, techniques=FULL)
    cut = step_traffic(replace(full, degrees=Degrees(shard=2)), micro_batches=3)
    weights = 8_030_261_248
    assert cut.gradients == pytest.approx(4 * weights / 2, rel=1e-3)
    assert cut.weights == pytest.approx(3 * 2 * 2 * weights / 2, rel=1e-3)
    rows = step_traffic(replace(facts, degrees=Degrees(context=2)))
    assert rows.rows == 32 * 2048 * 2 * (2 * 4096 + 2 * 1024) * 2 // 2


def test_adapters_are_whole_on_ranks_that_share_the_base():
    one = card(139, 4096, techniques=TRIED)
    whole, half = (memory_need(one.techniques, one, degrees) for degrees in (Degrees(), Degrees(shard=2)))
    assert half.trained == whole.trained
    assert half.weights == pytest.approx((whole.weights + 4 * ADAPTERS) / 2, abs=1)
    assert half.exchange > 4 * ADAPTERS
    facts = replace(one, degrees=Degrees(shard=2))
    assert step_traffic(facts).gradients == 4 * ADAPTERS


def test_tokens_travel_in_place_of_experts():
    """Two ranks of a mixture send the hidden states of their tokens; three ranks gather experts that 3 does not
    divide."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 1024, "head_dim": 128}
    one = card(139, 4096, model={**LLAMA, "model_type": "qwen3_moe", **experts}, techniques={})
    one = replace(one, techniques=FULL)
    two, three = (step_traffic(replace(one, degrees=Degrees(shard=parts)), 3) for parts in (2, 3))
    assert two.tokens == 3 * 4 * 32 * 4096 * 4096 * 2
    assert three.tokens == 0
    weights = 32 * 4 * 3 * 1024 * 4096
    assert three.gradients * 3 / 2 - two.gradients * 2 == pytest.approx(4 * weights, rel=1e-6)
    assert three.weights * 3 / 2 - two.weights * 2 == pytest.approx(3 * 2 * 2 * weights, rel=1e-6)
    half, third = (forecast(replace(one, degrees=Degrees(shard=parts)), RecomputePlan("input")) for parts in (2, 3))
    assert third.exchange - half.exchange == pytest.approx(3 * 2 * weights / 32, rel=1e-6)


def test_tokens_travel_to_experts_in_fp8_too():
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 1024, "head_dim": 128}
    quantize = {"type": "fp8", "experts": "on"}
    one = card(139, 4096, model={**LLAMA, "model_type": "qwen3_moe", **experts}, techniques={})
    one = replace(one, techniques=enable(lora=TRIED["lora"], quantize=quantize, checkpointing={"policy": "full"}))
    two = step_traffic(replace(one, degrees=Degrees(shard=2)))
    assert two.tokens == 4 * 32 * 4096 * 4096 * 2
