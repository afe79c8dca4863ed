"""How ranks may share the work of a run, and which of these ways fits."""

from __future__ import annotations

from support.forecasts import LLAMA, TECHNIQUES, card

from fxtune.distributed.parallel import Degrees
from fxtune.settle.degrees import choose, fits, memory_need, possible
from fxtune.system.terminal.units import GIB

LLAMA_70B = dict(LLAMA, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64)
TRIED = {**TECHNIQUES, "lora": {"r": 16, "target_modules": ["all-linear"]}, "checkpointing": {"policy": "auto"}}
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
    assert fits(facts.techniques, facts, Degrees())
    chosen, need = choose(facts.techniques, facts, possible(2))
    assert chosen == Degrees(replicate=2)
    assert need.exchange == 4 * ADAPTERS  # one float32 buffer


def test_weights_are_cut_where_a_copy_does_not_fit():
    facts = card(139, 4096, model=LLAMA_70B, techniques=TRIED)
    assert not fits(facts.techniques, facts, Degrees())
    chosen, need = choose(facts.techniques, facts, possible(4))
    assert chosen == Degrees(replicate=2, shard=2)
    assert need.device <= facts.free_memory
    assert need.weights < 70 * GIB
    # The head and two layers, without the embedding, which is freed after its use.
    assert 2 * (128256 * 8192 + 2 * 855_638_016) < need.exchange < 2 * (2 * 128256 * 8192 + 2 * 855_638_016) + 1e9


def test_rows_are_cut_where_one_does_not_fit():
    facts = card(139, 2**20, techniques=TRIED, host=256)
    assert not fits(facts.techniques, facts, Degrees(shard=2))
    chosen, need = choose(facts.techniques, facts, possible(2))
    assert chosen == Degrees(context=2)
    # Half of it, and what ranks hold to exchange their pieces.
    assert need.backward < 0.65 * memory_need(facts.techniques, facts, Degrees(shard=2)).backward


def test_the_smallest_is_chosen_if_nothing_fits():
    facts = card(8, 4096, model=LLAMA_70B, techniques=TRIED)
    chosen, need = choose(facts.techniques, facts, possible(2))
    assert (
        need.device == min(memory_need(facts.techniques, facts, one).device for one in possible(2)) > facts.free_memory
    )
    assert chosen.shard == 2
