"""Forecasts for several ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.architectures import enable
from support.forecasts import LLAMA, TECHNIQUES, card

from fxtune.distributed.parallel import Degrees
from fxtune.system.units import GIB
from fxtune.techniques.checkpointing.plan import RecomputePlan
from fxtune.techniques.estimate.degrees import choose, fits, need_with, possible, sent
from fxtune.techniques.estimate.memory import forecast

LLAMA_70B = dict(LLAMA, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64)
TRIED = {**TECHNIQUES, "lora": {"r": 16, "target_modules": ["all-linear"]}, "checkpointing": {"policy": "auto"}}
FULL = enable(compile={}, liger={"fused_linear_cross_entropy": "on"}, checkpointing={"policy": "full"})
ADAPTERS = 41_943_040
"""Rank-16 adapters on all linears of the 8B shape."""


def test_every_way_to_share_is_listed_once_and_copies_come_first():
    found = list(possible(4))
    assert found[0] == Degrees(replicate=4)
    assert len(found) == len(set(found)) == 6
    assert all(one.ranks == 4 for one in found)
    assert [one.context for one in found] == sorted(one.context for one in found)


def test_replicas_are_chosen_where_a_copy_fits_a_card():
    facts = card(139, 4096, rows=4, techniques=TRIED)
    assert fits(facts, Degrees())
    chosen, need = choose(facts, possible(2))
    assert chosen == Degrees(replicate=2)
    assert need.exchange == 4 * ADAPTERS  # one float32 buffer


def test_weights_are_cut_where_a_copy_does_not_fit():
    facts = card(139, 4096, model=LLAMA_70B, techniques=TRIED)
    assert not fits(facts, Degrees())
    chosen, need = choose(facts, possible(4))
    assert chosen == Degrees(replicate=2, shard=2)
    assert need.device <= facts.free_memory
    assert need.weights < 70 * GIB
    # The head and two layers, without the embedding, which is freed after its use.
    assert 2 * (128256 * 8192 + 2 * 855_638_016) < need.exchange < 2 * (2 * 128256 * 8192 + 2 * 855_638_016) + 1e9


def test_rows_are_cut_where_one_does_not_fit():
    facts = card(139, 2**20, techniques=TRIED, host=256)
    assert not fits(facts, Degrees(shard=2))
    chosen, need = choose(facts, possible(2))
    assert chosen == Degrees(context=2)
    # Half of it, and what ranks hold to exchange their pieces.
    assert need.layer < 0.65 * need_with(facts, Degrees(shard=2)).layer


def test_the_smallest_is_chosen_if_nothing_fits():
    facts = card(8, 4096, model=LLAMA_70B, techniques=TRIED)
    chosen, need = choose(facts, possible(2))
    assert need.device == min(need_with(facts, one).device for one in possible(2)) > facts.free_memory
    assert chosen.shard == 2


def test_parts_of_weights_and_rows_take_their_share_of_memory():
    one = card(139, 8192, techniques={})
    one = replace(one, techniques=FULL)
    plan = RecomputePlan("input")
    whole, half = (forecast(replace(one, degrees=degrees), plan) for degrees in (Degrees(), Degrees(shard=2)))
    assert half.weights == pytest.approx(whole.weights / 2, abs=1)
    assert half.trained == pytest.approx(whole.trained / 2, abs=1)
    assert (half.kept, whole.exchange) == (whole.kept, 0)
    assert half.layer < whole.layer  # with half of the gradients
    rows = forecast(replace(one, degrees=Degrees(context=2)), plan)
    assert (rows.kept, rows.weights) == (whole.kept // 2, whole.weights)


def test_what_ranks_send():
    facts = card(139, 4096, techniques=TRIED)
    assert sent(facts).total == 0
    two = sent(replace(facts, degrees=Degrees(replicate=2)), micro_batches=8)
    assert (two.gradients, two.total) == (4 * ADAPTERS, 4 * ADAPTERS)  # 168 MB, once a step
    assert sent(replace(facts, degrees=Degrees(replicate=4))).gradients == 6 * ADAPTERS
    full = replace(facts, techniques=FULL)
    cut = sent(replace(full, degrees=Degrees(shard=2)), micro_batches=3)
    weights = 8_030_261_248
    assert cut.gradients == pytest.approx(4 * weights / 2, rel=1e-3)
    assert cut.weights == pytest.approx(3 * 2 * 2 * weights / 2, rel=1e-3)
    rows = sent(replace(facts, degrees=Degrees(context=2)))
    assert rows.rows == 32 * 2048 * 2 * (2 * 4096 + 2 * 1024) * 2 // 2


def test_adapters_are_whole_on_ranks_that_share_the_base():
    one = card(139, 4096, techniques=TRIED)
    whole, half = need_with(one, Degrees()), need_with(one, Degrees(shard=2))
    assert half.trained == whole.trained
    assert half.weights == pytest.approx((whole.weights + 4 * ADAPTERS) / 2, abs=1)
    assert half.exchange > 4 * ADAPTERS
    facts = replace(one, degrees=Degrees(shard=2))
    assert sent(facts).gradients == 4 * ADAPTERS
