"""Step-time estimates: levels, transfers, and FLOPs that torch counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.architectures import built, facts_of, random_model
from support.forecasts import LLAMA, PEFT, QWEN3_5, TECHNIQUES, card

from fxtune.distributed.parallel import Degrees
from fxtune.estimate import cards, step_time
from fxtune.estimate.memory import forecast
from fxtune.facts.recomputation import LEVELS, RecomputePlan
from fxtune.techniques.checkpointing.technique import Checkpointing
from fxtune.techniques.pipeline import Pipeline, make_probe


def test_lower_levels_take_less_memory_and_more_time():
    for change in ({}, {"num_key_value_heads": 32}, {"intermediate_size": 4096}, {"hidden_size": 2048}):
        for techniques in (TECHNIQUES, PEFT, {**TECHNIQUES, "quantize": {"type": "fp8"}}):
            facts = card(139, 16384, model={**LLAMA, **change}, techniques=techniques)
            kept = [forecast(facts, RecomputePlan(level)).kept for level in LEVELS]
            times = [step_time.overhead(facts, RecomputePlan(level)) for level in LEVELS]
            assert kept == sorted(kept)
            assert times == sorted(times, reverse=True)
            assert times[-1] == 0


def test_offload_costs_time_only_if_transfers_outlast_computation():
    """At 64k tokens a layer computes for 100 ms and its 2.4 GB take 47 ms; at 4k it computes for 2 ms and they take 3."""

    def late(length: int) -> float:
        facts = card(139, length)
        keeping = RecomputePlan("narrow", sent="kept")
        extra = step_time.overhead(facts, keeping) - step_time.overhead(facts, RecomputePlan("narrow"))
        return extra / (32 * step_time.layer_time(facts).forward)

    assert late(65536) < 0.02
    assert late(4096) > 0.05


def test_recomputed_flops_equal_torch_s_counter():
    """Between two levels the FLOPs of a step differ by layer_time()'s share of that level."""
    from torch.utils.flop_counter import FlopCounterMode

    flops = {}
    for level in ("attention", "narrow", "wide", "everything"):
        pipeline = Pipeline(checkpointing=Checkpointing(True)._uniform(level, ["gate_proj", "up_proj"]))
        model = built(pipeline, random_model("llama")).train()
        with FlopCounterMode(display=False) as counter:
            model(**make_probe(model)).logits.sum().backward()
        flops[level] = counter.get_total_flops()
    facts = replace(facts_of(random_model("llama")), rows=(24,))
    layer = step_time.layer_time(facts)
    card_flops = cards.rates(facts).matmul
    assert flops["wide"] == flops["everything"]
    assert flops["narrow"] - flops["wide"] == pytest.approx(2 * layer.wide * card_flops)  # two layers
    assert flops["attention"] - flops["narrow"] == pytest.approx(2 * layer.narrow * card_flops)


def test_a_micro_batch_takes_about_as_long_as_measured():
    """6,570 tokens/s, one H200, rows of one 65,536-token document (docs/performance.md)."""
    facts = card(139, 65536, techniques={**TECHNIQUES, "checkpointing": {"policy": "auto"}})
    facts = replace(facts, techniques=facts.techniques.decided(facts)[0])
    speed = 65536 / step_time.micro_batch_seconds(facts, facts.execution.recompute)
    assert speed == pytest.approx(6570, rel=0.1)
    half = replace(facts, degrees=Degrees(context=2))
    seconds = (step_time.micro_batch_seconds(case, RecomputePlan("input")) for case in (half, facts))
    assert next(seconds) == pytest.approx(next(seconds) / 2, rel=0.01)


def test_linear_attention_takes_as_long_as_published():
    """flash-linear-attention on an H200: 0.472 ms forward and 1.444 ms backward for a layer of 8,192 tokens."""
    layer = step_time.layer_time(card(139, 8192, model=QWEN3_5))
    without = replace(layer, recurrence=0)
    seconds = layer.forward - without.forward + layer.backward(False) - without.backward(False)
    assert seconds == pytest.approx(1.916e-3 * 24 / 32, rel=0.05)
    saved = layer.recompute("input") - layer.recompute("attention")
    assert saved == pytest.approx(layer.recurrence + layer.attention)


def test_layers_with_a_sliding_window_attend_to_less():
    model = {**LLAMA, "model_type": "ministral", "head_dim": 128, "sliding_window": 1024}
    kinds = ["full_attention", "sliding_attention"] * 16
    facts, mixed, narrow = (
        card(139, 65536, model={**model, "layer_types": types})
        for types in (["full_attention"] * 32, kinds, ["sliding_attention"] * 32)
    )
    times = [step_time.layer_time(case).attention for case in (facts, mixed, narrow)]
    assert times[1] == pytest.approx((times[0] + times[2]) / 2)
    assert times[2] == pytest.approx(times[0] / 32)


def test_a_mixture_takes_longer_than_a_dense_mlp_of_the_width_that_a_token_uses():
    """Rows are gathered and added up for each expert, and adapters of experts read them."""
    experts = {"model_type": "qwen3_moe", "num_experts": 64, "num_experts_per_tok": 8}
    experts |= {"moe_intermediate_size": 14336 // 8, "head_dim": 128}
    for techniques in (TECHNIQUES, {}):
        dense, mixture = (
            step_time.micro_batch_seconds(card(900, 16384, model=model, techniques=techniques), RecomputePlan())
            for model in (LLAMA, {**LLAMA, **experts})
        )
        assert 1.05 * dense < mixture < 1.6 * dense


def test_ranks_with_divided_experts_wait_in_each_layer_and_clipping_takes_time():
    experts = {"model_type": "qwen3_moe", "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    two = card(139, 4096, model={**LLAMA, **experts}, techniques={}, degrees=Degrees(shard=2))
    shallow = replace(two, model={**two.model, "num_hidden_layers": 16})
    one = replace(two, degrees=Degrees())
    waits = [
        step_time.micro_batch_seconds(facts, RecomputePlan())
        - step_time.micro_batch_seconds(replace(facts, degrees=Degrees()), RecomputePlan())
        for facts in (two, shallow)
    ]
    assert waits[0] == pytest.approx(2 * waits[1], rel=0.01)
    assert 32 * 0.005 < waits[0] < 32 * 0.02
    assert step_time.update_seconds(two) == pytest.approx(step_time.update_seconds(one) / 2, rel=0.01)
    assert step_time.update_seconds(replace(one, in_backward=True)) < step_time.update_seconds(one)
