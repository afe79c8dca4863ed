"""Rows that grow in stages: each supervised token of an epoch is learned once, in rows of the stage's length."""

from __future__ import annotations

import dataclasses
import pickle
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tables import natural, table, training

from fxtune.data.batches.batch import IGNORE_INDEX
from fxtune.data.batches.plan import Plan
from fxtune.data.config import DataConfig, MixConfig, OnLong
from fxtune.data.formats.registry import FORMATS
from fxtune.errors import ConfigError, DataError

document = st.integers(2, 100).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(1, 500), min_size=n, max_size=n),
        st.lists(st.booleans(), min_size=n, max_size=n),
    )
)
corpus = st.lists(document, min_size=1, max_size=40).map(lambda found: [*found, ([7, 8, 9], [False, True, True])])
several = st.lists(corpus, min_size=1, max_size=2).map(lambda found: [table(d, f"t{i}") for i, d in enumerate(found)])
schedules = st.sampled_from(
    [[[0.0, 8], [0.5, 64]], [[0.0, 16], [0.3, 32], [0.6, 64]], [[0.0, 4], [0.9, 64]], [[0.0, 32], [0.1, 64]]]
)
runs = st.fixed_dictionaries(
    dict(
        packing=st.booleans(),
        length_schedule=schedules,
        ramp=st.sampled_from([(), ((0.4, 8),)]),
        seed=st.integers(0, 2**40),
        epochs=st.sampled_from([1.0, 2.0, 3.0]),
        micro=st.sampled_from([1, 2, 4]),
    )
)
law = settings(max_examples=12)


def grown(tables, **options) -> Plan:
    return training(tables, step=4, sequence_length=64, **options)


def targets(plan: Plan) -> Counter:
    """How often each token of the tables is a target of the run, by (source, position in the table)."""
    found: Counter = Counter()
    for step in range(plan.steps):
        for micro in range(plan.micro_batches(step)):
            batch = plan.batch(step, micro)
            for row, pieces in enumerate(plan.contents(step, micro)):
                at = 0
                for piece in pieces:
                    first = int(plan.tables[piece.source].offsets[piece.document]) + piece.first
                    learned = (batch.targets[row, at : at + piece.length] != IGNORE_INDEX).nonzero().flatten() + 1
                    found.update((piece.source, first + one) for one in learned.tolist())
                    at += piece.length
    return found


@law
@given(several, runs)
def test_each_supervised_token_of_an_epoch_is_learned_once(tables, run):
    plan = grown(tables, **run)
    plain = grown(tables, **{**run, "length_schedule": []})
    assert targets(plan) == targets(plain)
    assert plan.epoch(plan.steps) == run["epochs"]


@law
@given(several, runs)
def test_each_row_has_the_length_of_its_stage_and_each_step_the_same_room(tables, run):
    plan = grown(tables, **run)
    lengths, planned = run["length_schedule"], plan.step_rows.planned
    assert 0 <= planned - plan.steps <= 1 + planned // 4
    for step in range(plan.steps):
        length = [size for share, size in lengths if step >= share * planned - 1e-6][-1]
        batch = [size for share, size in ((0, 4), *run["ramp"]) if step >= share * planned - 1e-6][-1]
        if step < plan.steps - 1:
            assert plan.rows(step) * length == batch * 64
            assert plan.micro_batches(step) == batch // run["micro"]
        for micro in range(plan.micro_batches(step)):
            batch = plan.batch(step, micro)
            assert batch.input_ids.shape[1] == length if run["packing"] else batch.input_ids.shape[1] <= length
            assert batch.input_ids.numel() <= run["micro"] * 64
            assert batch.tokens > 0


@law
@given(several, runs)
def test_a_step_is_a_function_of_plan_and_seed(tables, run):
    plan, other = grown(tables, **run), pickle.loads(pickle.dumps(grown(tables, **run)))
    assert plan.fingerprint == other.fingerprint
    for step in np.random.default_rng(0).permutation(plan.steps).tolist():
        for micro in range(plan.micro_batches(step)):
            assert other.contents(step, micro) == plan.contents(step, micro)


def test_long_documents_wait_for_the_stage_that_takes_them_whole():
    """Half of the tokens are in documents of at most 16 tokens, and 40 % of the steps have rows of 16."""
    tables = [table([([1] * 16, [True] * 16)] * 200 + [([2] * 64, [True] * 64)] * 50)]
    plan = grown(tables, length_schedule=[[0.0, 16], [0.4, 64]], epochs=1.0)
    contents = [
        [piece for m in range(plan.micro_batches(step)) for row in plan.contents(step, m) for piece in row]
        for step in range(plan.steps)
    ]
    assert all(
        piece.length == tables[0].offsets[piece.document + 1] - tables[0].offsets[piece.document]
        for step in contents
        for piece in step
    )
    assert {piece.length for step in contents[:10] for piece in step} == {16}
    assert plan.step_rows.starts[1].step == 10
    assert not [note for note in plan.notes() if "cut into shorter rows" in note]


def test_only_so_much_text_is_cut_as_fills_the_steps():
    tables = [table([([1] * 16, [True] * 16)] * 40 + [([2] * 64, [True] * 64)] * 90)]
    plan = grown(tables, length_schedule=[[0.0, 16], [0.4, 64]], epochs=1.0)
    cut = {
        piece.document
        for step in range(plan.steps)
        for row in plan.contents(step, 0)
        for piece in row
        if piece.length < 64 and piece.document >= 40
    }
    assert 0 < len(cut) < 50
    assert targets(plan) == targets(grown(tables, epochs=1.0))
    assert [note for note in plan.notes() if "documents are cut into shorter rows" in note]


@pytest.mark.parametrize("change", [dict(format=FORMATS["messages"]), dict()], ids=["chats", "on_long=drop"])
def test_documents_that_are_not_cut_need_longer_rows_in_time(change):
    tables = [dataclasses.replace(table([([1] * 16, [True] * 16)] * 100 + [([2] * 64, [True] * 64)] * 75), **change)]
    options = {} if change else dict(on_long=OnLong.drop)
    with pytest.raises(DataError, match=r"are longer \(the first is document 101 of table, .* at share 0\.24 or ear"):
        grown(tables, length_schedule=[[0.0, 16], [0.5, 64]], epochs=1.0, **options)
    plan = grown(tables, length_schedule=[[0.0, 16], [0.24, 64]], epochs=1.0, **options)
    assert targets(plan) == targets(grown(tables, epochs=1.0, **options))
    bounded = grown(tables, length_schedule=[[0.0, 16], [0.24, 64]], epochs=1.0, max_steps=plan.steps + 15, **options)
    assert (bounded.steps, targets(bounded)) == (plan.steps, targets(plan)), "max_steps is an upper bound"


def test_run_of_fixed_steps_over_weighted_sources_grows_at_the_same_steps():
    tables = [natural(60, 20, 0, "a"), natural(60, 40, 1, "b")]
    plan = grown(tables, weights=[1.0, 2.0], length_schedule=[[0.0, 8], [0.5, 64]], max_steps=20)
    assert [plan.batch(step, 0).input_ids.shape for step in (0, 9, 10, 19)] == [(16, 8), (16, 8), (2, 64), (2, 64)]
    assert plan.fingerprint != grown(tables, weights=[1.0, 2.0], max_steps=20).fingerprint
    assert (plan.micro_rows(0), plan.micro_rows(10), plan.last_stage) == (16, 2, 10)
    last = grown(tables, weights=[1.0, 2.0], length_schedule=[[0.0, 8], [0.5, 64]], max_steps=20).until(12, 2)
    assert [last.contents(step, 0) for step in (2, 11)] == [plan.contents(step, 0) for step in (0, 9)]


def test_rows_of_a_stage_are_dealt_out_to_ranks_and_cut_into_pieces():
    tables = [natural(200, 20, 0)]
    plan = grown(tables, length_schedule=[[0.0, 16], [0.5, 64]], epochs=1.0)
    for step in range(plan.steps - 1):
        whole = [plan.batch(step, micro).input_ids for micro in range(plan.micro_batches(step))]
        for rank in (0, 1):
            own = plan.for_rank(rank, 2)
            assert [own.batch(step, m).input_ids.tolist() for m in range(own.micro_batches(step))] == [
                one.tolist() for one in whole[rank::2]
            ]
        half = plan.with_row_piece(1, 2).batch(step, 0).input_ids
        assert half.tolist() == whole[0][:, whole[0].shape[1] // 2 :].tolist()


def test_share_of_long_documents_and_rows_that_grow_are_refused_together():
    with pytest.raises(ConfigError, match=r"data\.length_schedule makes long documents wait"):
        grown([natural(9, 20, 0)], length_schedule=[[0.0, 16], [0.5, 64]], mix=MixConfig(0.5, 32))


def test_lengths_that_rows_can_have():
    def lengths(**options) -> tuple[int, ...]:
        return DataConfig(sequence_length=64, length_schedule=[[0.0, 16], [0.25, 64]], **options).row_lengths()

    assert lengths(packing=True) == (16, 64)
    assert lengths(packing=False, buckets=[8, 32, 96]) == (8, 16, 32, 64)
    assert lengths(packing=False) == ()
    assert DataConfig(sequence_length=64, length_schedule=[[0.0, 16], [0.25, 64]]).mean_row_length() == 52
    assert DataConfig(sequence_length=64).mean_row_length() == 64


def test_batches_of_a_stage_have_room_for_equally_many_documents():
    """As many slots as their rows may need: compiled code and CUDA graphs see few shapes."""
    plan = training(
        [natural(600, 14, 2)], step=8, sequence_length=256, epochs=1.0, length_schedule=[[0.0, 32], [0.5, 256]]
    )
    slots = {}
    for step in range(plan.steps):
        for micro in range(plan.micro_batches(step)):
            slots.setdefault(plan.stage(step), set()).add(len(plan.batch(step, micro).cu_seqlens) - 1)
    assert [len(numbers) for numbers in slots.values()] == [1, 1]
