"""The data plan loses, repeats and mixes up no document, and a batch is a function of plan, seed and step alone."""

from __future__ import annotations

import pickle
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tables import PAD, Table, natural, table, training

from fxtune.data.batches.batch import IGNORE_INDEX
from fxtune.data.batches.build import plan_evaluation, plan_training
from fxtune.data.batches.plan import Plan
from fxtune.data.config import DataConfig, OnLong, SourceConfig


def batches(plan: Plan):
    return [plan.batch(step, micro) for step in range(plan.steps) for micro in range(plan.micro_batches(step))]


def same(one, other) -> bool:
    return all(
        (getattr(one, name) == getattr(other, name)).all()
        if getattr(one, name).shape == getattr(other, name).shape
        else False
        for name in ("input_ids", "targets", "position_ids")
    )


def split_batch(plan: Plan, step: int, micro: int):
    """(piece, ids, targets) of each segment of a micro-batch, split where the positions restart, as the model does."""
    batch = plan.batch(step, micro)
    for row, pieces in enumerate(plan.contents(step, micro)):
        starts = (batch.position_ids[row] == 0).nonzero().flatten().tolist()
        ends = [*starts[1:], batch.position_ids.shape[1]]
        padded = len(starts) - len(pieces)
        assert padded in (0, 1)
        for piece, start, end in zip(pieces, starts, ends, strict=False):
            if not plan.stream.settings.packing:  # the padding after a single document has no start
                assert (batch.input_ids[row, start + piece.length :] == PAD).all()
                assert (batch.targets[row, start + piece.length - 1 :] == IGNORE_INDEX).all()
                end = start + piece.length
            assert end - start == piece.length
            assert batch.position_ids[row, start:end].tolist() == list(range(piece.length))
            yield piece, batch.input_ids[row, start:end].numpy(), batch.targets[row, start:end].numpy()
        if padded:
            assert (batch.input_ids[row, starts[-1] :] == PAD).all()
            assert (batch.targets[row, starts[-1] :] == IGNORE_INDEX).all()


document = st.integers(1, 40).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(1, 500), min_size=n, max_size=n), st.lists(st.booleans(), min_size=n, max_size=n)
    )
)
corpus = st.lists(document, min_size=1, max_size=40).map(lambda found: [*found, ([7, 8, 9], [False, True, True])])
several = st.lists(corpus, min_size=1, max_size=3).map(lambda found: [table(d, f"t{i}") for i, d in enumerate(found)])
shapes = st.fixed_dictionaries(
    dict(
        packing=st.booleans(),
        on_long=st.sampled_from([OnLong.split, OnLong.truncate, OnLong.drop]),
        sequence_length=st.sampled_from([8, 16, 64]),
        seed=st.integers(0, 2**40),
    )
)
law = settings(max_examples=15)


@law
@given(several, shapes, st.sampled_from([(1, 1), (1, 4), (2, 4), (3, 3)]))
def test_epoch_has_every_document_once_complete_and_separate(tables, shape, sizes):
    """Ids are unchanged; targets are the ids shifted by one inside each segment, never across its end."""
    length = shape["sequence_length"]
    plan = training(tables, micro=sizes[0], step=sizes[1], **shape)
    seen: Counter = Counter()
    for step in range(plan.steps):
        for micro in range(plan.micro_batches(step)):
            for piece, ids, targets in split_batch(plan, step, micro):
                seen[piece[:4]] += 1
                start = tables[piece.source].offsets[piece.document] + piece.first
                whole = slice(start, start + piece.length)
                assert (ids == tables[piece.source].ids[whole]).all()
                marks = tables[piece.source].supervised[whole]
                assert targets.tolist() == [*np.where(marks[1:], ids[1:], IGNORE_INDEX).tolist(), IGNORE_INDEX]
    expected = Counter()
    for source, t in enumerate(tables):
        for index in range(len(t)):
            size = int(t.offsets[index + 1] - t.offsets[index])
            firsts = range(0, size, length) if shape["on_long"] is OnLong.split else [0]
            for first in firsts if size <= length or shape["on_long"] is not OnLong.drop else []:
                piece = (source, index, first, min(size - first, length))
                start = t.offsets[index] + first
                if t.supervised[start + 1 : start + piece[3]].any():
                    expected[piece] += 1
    assert seen == expected


@law
@given(several, shapes, st.integers(1, 30))
def test_batch_is_a_function_of_plan_seed_and_step(tables, shape, max_steps):
    plan = training(tables, max_steps=max_steps, epochs=5, **shape)
    rebuilt = training(tables, max_steps=max_steps, epochs=5, **shape)
    for step in np.random.default_rng(0).permutation(plan.steps).tolist():  # any order gives the same batches
        assert same(rebuilt.batch(step, 0), plan.batch(step, 0))
    assert all(
        same(one, other) for one, other in zip(batches(plan), batches(pickle.loads(pickle.dumps(plan))), strict=True)
    )
    assert plan.fingerprint == rebuilt.fingerprint


@law
@given(several, shapes, st.booleans(), st.sampled_from([1, 2, 4]))
def test_counts_of_a_step_equal_those_of_its_batches(tables, shape, weighted, micro):
    plan = training(tables, micro=micro, epochs=2.5, weights=[1.0, 2.5, 0.3] if weighted else None, **shape)
    for step in range(plan.steps):
        found = [plan.batch(step, m) for m in range(plan.micro_batches(step))]
        assert (
            plan.supervised(step)
            == sum(b.supervised for b in found)
            == sum(int((b.targets != IGNORE_INDEX).sum()) for b in found)
        )
        assert plan.tokens(step) == sum(b.tokens for b in found)
        assert all(b.supervised > 0 for b in found)
        rows = sum(len(b.input_ids) for b in found)
        assert rows == 4 or (step == plan.steps - 1 and 0 < rows < 4)
    assert plan.epoch(0) == 0
    assert plan.epoch(plan.steps) == pytest.approx(2.5, abs=0.5 / len(plan.stream.epoch(2)) + 1e-9)


def test_micro_batch_size_keeps_step_documents_and_fingerprint():
    data = [natural(60, 20, 0)]
    for packing in (True, False):
        plans = [training(data, micro=micro, step=8, packing=packing, sequence_length=64) for micro in (1, 2, 8)]
        contents = [
            [sorted(d for m in range(plan.micro_batches(s)) for d in plan.documents(s, m)) for s in range(plan.steps)]
            for plan in plans
        ]
        assert contents[0] == contents[1] == contents[2]
        assert len({plan.fingerprint for plan in plans}) == 1


def test_fingerprint_changes_if_a_steps_documents_change():
    data = [natural(60, 20, 0, "a"), natural(60, 20, 1, "b")]
    base = dict(sequence_length=64, seed=0, max_steps=5)
    longer = training(data, **{**base, "max_steps": 50})
    assert longer.fingerprint == training(data, **base).fingerprint
    changed = [
        dict(seed=1),
        dict(step=8),
        dict(sequence_length=32),
        dict(packing=False),
        dict(eval_fraction=0.2),
        dict(weights=[1.0, 2.0]),
        dict(on_long=OnLong.drop),
    ]
    prints = [training(data, **{**base, **change}).fingerprint for change in changed]
    prints.append(training([natural(60, 20, 2, "a"), data[1]], **base).fingerprint)
    assert len({longer.fingerprint, *prints}) == len(prints) + 1


@law
@given(several, st.lists(st.floats(0.01, 100), min_size=3, max_size=3), st.booleans())
def test_weighted_document_repeats_only_after_all_others(tables, weights, packing):
    plan = training(tables, weights=weights, sequence_length=16, packing=packing)
    counts: Counter = Counter()
    share = np.zeros(len(tables))
    for number in range(4):
        epoch = plan.stream.epoch(number)
        assert len(epoch) > 0
        counts.update(epoch.segments.tolist())
        share += np.bincount(
            plan.stream.source[epoch.segments], plan.stream.segments.supervised[epoch.segments], len(tables)
        )
        for source in range(len(tables)):
            mine = [counts[s] for s in np.flatnonzero(plan.stream.source == source).tolist()]
            assert max(mine) - min(mine) <= 1
    # Over all epochs a source is at most one segment (16 tokens at most) away from its share.
    wanted = 4 * sum(plan.stream.supply) * np.array(weights[: len(tables)]) / sum(weights[: len(tables)])
    assert (abs(share - wanted) <= 17).all()


def test_held_out_documents_are_chosen_by_content():
    same_text = ([5, 6, 7, 8], [True] * 4)
    documents = [([i, i + 1, i + 2], [True] * 3) for i in range(1, 401)]
    data = table([*documents, same_text, same_text])
    turned = table([same_text, *documents[::-1], same_text])

    def ids(plan: Plan) -> Counter:
        found: Counter = Counter()
        for step in range(plan.steps):
            for micro in range(plan.micro_batches(step)):
                found.update(tuple(tokens.tolist()) for _, tokens, _ in split_batch(plan, step, micro))
        return found

    config = DataConfig(sources=[SourceConfig(path="x")], eval_fraction=0.2, sequence_length=32)
    sides = []
    for seed, t in ((0, data), (7, turned)):
        kept = plan_training([t], config, micro_batch_size=2, global_batch_size=4, seed=seed)
        held = plan_evaluation([t], config, micro_batch_size=2, shares=[0.2])
        assert not set(ids(kept)) & set(ids(held))
        assert ids(kept) + ids(held) == Counter(tuple(tokens) for tokens, _ in [*documents, same_text, same_text])
        sides.append(ids(held))
    assert sides[0] == sides[1]
    assert 50 < sum(sides[0].values()) < 110
    larger = plan_evaluation(
        [data],
        DataConfig(sources=config.sources, eval_fraction=0.4, sequence_length=32),
        micro_batch_size=2,
        shares=[0.4],
    )
    assert not sides[0] - ids(larger)  # a larger share keeps the documents held out before


@pytest.mark.parametrize("packing", [True, False])
def test_evaluation_has_each_segment_once_in_a_fixed_order(packing):
    data = [natural(50, 30, 0, "a"), natural(30, 30, 1, "b")]
    config = DataConfig(
        eval_sources=[SourceConfig(path="a"), SourceConfig(path="b")], sequence_length=64, packing=packing
    )
    plan, again = (plan_evaluation(data, config, micro_batch_size=4) for _ in range(2))
    found = Counter(piece for step in range(plan.steps) for row in plan.contents(step, 0) for piece in row)
    assert set(found.values()) == {1}
    assert sum(piece.length for piece in found) == sum(len(t.ids) - sum(chunks_without_targets(t, 64)) for t in data)
    assert all(same(one, other) for one, other in zip(batches(plan), batches(again), strict=True))


def chunks_without_targets(t: Table, length: int) -> list[int]:
    found = []
    for start, end in zip(t.offsets[:-1], t.offsets[1:], strict=True):
        for first in range(start, end, length):
            last = min(first + length, end)
            if not t.supervised[first + 1 : last].any():
                found.append(last - first)
    return found


def test_rows_are_padded_to_the_smallest_bucket_that_holds_them():
    data = [natural(200, 40, 3)]
    plan = training(data, packing=False, sequence_length=300, buckets=[32, 64, 512, 1024], step=8)
    widths = {batch.input_ids.shape[1] for batch in batches(plan)}
    assert widths <= {32, 64, 512}
    assert len(widths) > 1
    for batch in batches(plan):
        longest = int((batch.input_ids != PAD).sum(1).max())
        assert batch.input_ids.shape[1] == min(w for w in (32, 64, 512) if w >= longest)
    assert DataConfig(packing=False, sequence_length=300, buckets=[32, 64]).row_lengths() == (32, 64, 300)
    assert DataConfig(packing=False).row_lengths() == ()
    assert DataConfig(sequence_length=300).row_lengths() == (300,)
    for batch in batches(training(data, packing=False, sequence_length=300, step=8)):
        assert batch.input_ids.shape[1] == int((batch.input_ids != PAD).sum(1).max())


def test_sorting_inside_a_step_saves_padding():
    data = [natural(400, 40, 4)]
    for step, buckets in ((16, []), (2, []), (16, [64, 128])):
        plan = training(data, packing=False, sequence_length=512, micro=2, step=step, buckets=buckets)
        found = batches(plan)
        cells, tokens = sum(b.input_ids.numel() for b in found), sum(b.tokens for b in found)
        assert plan.summary()["padding_share"] == pytest.approx(1 - tokens / cells)
    shares = [
        training(data, packing=False, sequence_length=512, micro=2, step=s).summary()["padding_share"] for s in (16, 2)
    ]
    assert shares[0] < shares[1] / 2
    packed = training(data, sequence_length=512, step=2)
    found = batches(packed)
    cells, tokens = sum(b.input_ids.numel() for b in found), sum(b.tokens for b in found)
    assert packed.summary()["padding_share"] == pytest.approx(1 - tokens / cells)
    assert {b.input_ids.shape[1] for b in found} == {512}


def test_plan_that_goes_back_repeats_the_rows_of_earlier_steps():
    whole = training([natural(60, 20, 0)], micro=2, step=4, sequence_length=64, max_steps=12)
    again = whole.until(9, dropped=3)
    assert again.steps == 9
    assert [again.documents(step, 0) for step in range(6, 9)] == [whole.documents(step, 0) for step in range(3, 6)]
    assert again.epoch(9) == whole.epoch(6)
    assert again.fingerprint == whole.fingerprint
    ones = again.with_micro_batch_size(1)
    assert ones.documents(6, 0) + ones.documents(6, 1) == again.documents(6, 0)
    assert whole.until(12) is whole
    assert whole.until(9, dropped=3).until(15, dropped=3).steps == 15
    for step in (2, 9):
        with pytest.raises(IndexError):
            again.documents(step, 0)


@pytest.mark.parametrize("length", [dict(max_steps=9), dict(epochs=2.5), dict(epochs=2.5, max_steps=5)])
def test_growing_batch_takes_the_same_rows_in_the_same_order(length):
    tables = [natural(60, 20, 0)]
    even = training(tables, micro=2, step=4, sequence_length=64, epochs=10)
    ramp = training(tables, micro=2, step=4, sequence_length=64, ramp=((0.3, 8), (0.6, 16)), **length)
    rows, expected = (
        [row for step, micro in steps for row in plan.contents(step, micro)]
        for plan, steps in (
            (ramp, [(s, m) for s in range(ramp.steps) for m in range(ramp.micro_batches(s))]),
            (even, [(s, m) for s in range(even.steps) for m in range(even.micro_batches(s))]),
        )
    )
    assert rows == expected[: len(rows)]
    assert len(rows) == sum(map(ramp.rows, range(ramp.steps)))
    assert {ramp.rows(step) for step in range(ramp.steps - 1)} == {4, 8, 16}
    assert ramp.steps == length.get("max_steps", ramp.steps)
    if length == dict(epochs=2.5):
        assert ramp.epoch(ramp.steps) == pytest.approx(2.5, abs=0.05)
    assert ramp.fingerprint != even.fingerprint
    assert pickle.loads(pickle.dumps(ramp)).fingerprint == ramp.fingerprint
    assert ramp.until(3).fingerprint == ramp.fingerprint
    again = ramp.until(5, dropped=2)
    assert again.documents(4, 0) == ramp.documents(2, 0)


def test_documents_per_step_do_not_depend_on_the_length_of_the_run():
    tables = [natural(60, 20, 0)]
    short, long, steps = (
        training(tables, sequence_length=64, **length)
        for length in (dict(epochs=0.5), dict(epochs=3), dict(max_steps=2))
    )
    assert short.documents_per_step == long.documents_per_step == steps.documents_per_step
    whole = training(tables, sequence_length=64, epochs=1)
    documents = sum(
        len(whole.documents(step, micro)) for step in range(whole.steps) for micro in range(whole.micro_batches(step))
    )
    assert whole.documents_per_step == pytest.approx(documents / (whole.stream.end(0) / 4))
