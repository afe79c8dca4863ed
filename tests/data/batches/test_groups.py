"""Groups of documents stay whole: in rows, micro-batches, steps and ranks, on one side of a hold-out, after a resume."""

from __future__ import annotations

import math
import pickle
from collections import Counter
from itertools import chain

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.tables import grouped, natural, table, training

from fxtune.data.batches.batch import IGNORE_INDEX
from fxtune.data.batches.build import plan_evaluation
from fxtune.data.batches.duplicates import find_duplicates, first_copies
from fxtune.data.config import DataConfig, Dedup, MixConfig, OnLong, SourceConfig
from fxtune.errors import ConfigError, DataError

LENGTH = 64

document = st.integers(1, 12).flatmap(
    lambda size: st.tuples(
        st.lists(st.integers(1, 500), min_size=size, max_size=size),
        st.lists(st.booleans(), min_size=size, max_size=size),
    )
)
label = st.one_of(st.none(), st.floats(-8, 8, width=32))


def table_of(sizes):
    """A strategy for tables whose groups have numbers of documents drawn from `sizes`, with a label or a target."""

    def labelled(groups):
        return st.lists(label, min_size=sum(map(len, groups)), max_size=sum(map(len, groups))).map(
            lambda labels: grouped([*groups, TAUGHT[: len(groups[0])]], [*labels, *[1.0] * len(groups[0])])
        )

    group = sizes.flatmap(lambda size: st.lists(document, min_size=size, max_size=size))
    return st.lists(group, min_size=1, max_size=20).flatmap(labelled)


TAUGHT = [([7, 8, 9], [False, True, True])] * 5
any_table = table_of(st.integers(1, 5))
threes = table_of(st.just(3))
law = settings(max_examples=12, deadline=None)


def teaches(t, group: int) -> bool:
    documents = range(t.groups[group], t.groups[group + 1])
    return any(
        not math.isnan(t.labels[one]) or t.supervised[t.offsets[one] + 1 : t.offsets[one + 1]].any()
        for one in documents
    )


def groups_of(plan, step: int, micro: int) -> list[tuple[int, int]]:
    """(table, group) of each group of a micro-batch, in order. Fails unless the batch holds each of them whole, in
    consecutive slots, in one row with packing, and says so in `group_of` and `document_labels`."""
    batch, rows = plan.batch(step, micro), plan.contents(step, micro)
    packing, flat = plan.stream.settings.packing, batch.input_ids.flatten()
    targets = batch.targets.flatten()
    assert len(batch.group_of) == len(batch.document_labels) == len(batch.cu_seqlens) - 1
    used = (batch.group_of >= 0).nonzero().flatten().tolist()
    pieces = [(row, piece) for row, documents in enumerate(rows) for piece in documents]
    assert len(used) == len(pieces)
    found: dict[int, list] = {}
    for slot, (row, piece) in zip(used, pieces, strict=True):
        t = plan.tables[piece.source]
        begin = int(batch.cu_seqlens[slot])
        assert (
            flat[begin : begin + piece.length].tolist() == t.ids[t.offsets[piece.document] :][: piece.length].tolist()
        )
        assert batch.position_ids.flatten()[begin] == 0
        assert targets[begin + piece.length - 1] == IGNORE_INDEX, "a document does not predict the next one"
        assert batch.group_of[slot] == piece.group
        expected = t.labels[piece.document] if t.is_grouped else np.nan
        assert np.array_equal(batch.document_labels[slot].item(), expected, equal_nan=True)
        found.setdefault(piece.group, []).append((piece.source, row, piece.document))
    unused = batch.group_of < 0
    assert batch.document_labels[unused].isnan().all()
    assert list(found) == list(range(len(found)))
    names = []
    for members in found.values():
        source, documents = members[0][0], [document for _, _, document in members]
        bounds = plan.tables[source].groups
        group = int(np.searchsorted(bounds, documents[0], side="right")) - 1
        assert documents == list(range(bounds[group], bounds[group + 1])), "all documents of the group, in order"
        in_rows = [row for _, row, _ in members]
        first = in_rows[0]
        assert in_rows == ([first] * len(members) if packing else list(range(first, first + len(members))))
        names.append((source, group))
    return names


def taken(plan) -> list[list[tuple[int, int]]]:
    """The groups of each step."""
    return [
        [name for micro in range(plan.counted_micro_batches(step)) for name in groups_of(plan, step, micro)]
        for step in range(plan.steps)
    ]


@law
@given(any_table, any_table, st.integers(0, 2**40), st.sampled_from([(1, 1), (1, 4), (2, 4)]))
def test_epoch_has_every_group_once_and_whole(one, other, seed, sizes):
    plan = training([one, other], micro=sizes[0], step=sizes[1], seed=seed, sequence_length=LENGTH)
    expected = {
        (source, group) for source, t in enumerate((one, other)) for group in range(len(t.sizes)) if teaches(t, group)
    }
    assert Counter(name for step in taken(plan) for name in step) == Counter(expected)
    for step in range(plan.steps):
        batches = [plan.batch(step, micro) for micro in range(plan.micro_batches(step))]
        assert plan.groups(step) == sum(int(batch.group_of.max()) + 1 for batch in batches)
        assert len(plan.lengths(step)) == sum(int((batch.group_of >= 0).sum()) for batch in batches)
        assert plan.supervised(step) == sum(batch.supervised for batch in batches)


@law
@given(threes, st.integers(0, 2**40), st.booleans(), st.sampled_from([1, 2, 3]))
def test_unpacked_groups_take_rows_of_one_micro_batch_of_one_rank(t, seed, shuffled, ranks):
    options = dict(packing=False, sequence_length=LENGTH, seed=seed if shuffled else 0)
    plan = training([t], micro=6, step=18, **options)
    alone = taken(plan)
    assert {len(step) for step in alone[:-1]} <= {6}
    assert all(plan.rows(step) == 3 * len(groups) for step, groups in enumerate(alone))
    shares = [taken(plan.for_rank(rank, ranks)) for rank in range(ranks)]
    assert [Counter(step) for step in alone] == [Counter(chain(*steps)) for steps in zip(*shares, strict=True)]
    assert alone == taken(training([t], micro=18, step=18, **options))


@law
@given(any_table, st.integers(0, 2**40), st.sampled_from([2, 3]))
def test_ranks_share_the_groups_of_a_step_and_a_resumed_plan_has_the_same(t, seed, ranks):
    plan = training([t], micro=1, step=6, epochs=2.5, seed=seed, sequence_length=LENGTH)
    alone = taken(plan)
    shares = [taken(plan.for_rank(rank, ranks)) for rank in range(ranks)]
    assert [Counter(step) for step in alone] == [Counter(chain(*steps)) for steps in zip(*shares, strict=True)]
    resumed = pickle.loads(pickle.dumps(plan))
    last = plan.steps - 1
    assert [name for micro in range(resumed.micro_batches(last)) for name in groups_of(resumed, last, micro)] == alone[
        -1
    ]
    assert resumed.fingerprint == plan.fingerprint


@law
@example(grouped([[([1], [True])], TAUGHT[:1]]), 0.75, 1)  # both held out, the first has no target: empty sides
@given(any_table, st.floats(0.1, 0.9), st.sampled_from([None, 1, 4]))
def test_hold_out_takes_whole_groups(t, share, limit):
    data = DataConfig(sources=[SourceConfig(path="x")], eval_fraction=share, eval_limit=limit, sequence_length=LENGTH)
    sides = []
    for build in (
        lambda: training([t], sequence_length=LENGTH, eval_fraction=share),
        lambda: plan_evaluation([t], data, micro_batch_size=2, shares=data.held_out_shares),
    ):
        try:
            sides.append(Counter(name for step in taken(build()) for name in step))
        except DataError:  # one side has nothing to learn from
            sides.append(Counter())
    trained, held_out = sides
    assert not trained & held_out
    assert all(times == 1 for side in sides for times in side.values())
    if limit is None and trained and held_out:
        assert {group for _, group in trained + held_out} == {
            group for group in range(len(t.sizes)) if teaches(t, group)
        }
    assert len(held_out) <= (limit or math.inf)


def test_rows_that_grow_and_mixed_lengths_move_whole_groups():
    draw = np.random.default_rng(0)
    groups = [
        [(draw.integers(1, 99, size).tolist(), [True] * size) for size in draw.integers(2, 40, draw.integers(1, 4))]
        for _ in range(300)
    ]
    t = grouped(groups)
    growing = training([t], sequence_length=128, max_steps=20, length_schedule=[[0.0, 64], [0.3, 128]])
    mixed = training([t], sequence_length=128, mix=MixConfig(0.5, 60))
    for plan in (growing, mixed):
        counted = Counter(name for step in taken(plan) for name in step)
        assert len(counted) > 100
    assert max(counted.values()) <= math.ceil(max(kind["repeats"] for kind in _kinds(mixed)))
    with pytest.raises(ConfigError, match=r"data\.length_schedule=\[\]"):
        training(
            [grouped([TAUGHT[:2]])], micro=2, packing=False, sequence_length=8, length_schedule=[[0, 4], [0.5, 8]]
        )


def _kinds(plan):
    return plan.summary()["mix"]["long"], plan.summary()["mix"]["short"]


def test_a_group_beside_supervised_text():
    """Documents of other tables are groups by themselves, in the same rows; text is cut, a group is not."""
    plan = training([grouped([TAUGHT[:3]] * 4), natural(30, 60, 0)], sequence_length=LENGTH)
    batches = [plan.batch(step, micro) for step in range(plan.steps) for micro in range(plan.micro_batches(step))]
    assert sum(plan.groups(step) for step in range(plan.steps)) == plan.summary()["segments"]
    assert {len(batch.group_of) for batch in batches} == {len(batches[0].group_of)}, "recorded CUDA graphs fit"
    text = training([natural(30, 60, 0)], sequence_length=LENGTH)
    assert text.batch(0, 0).group_of is None
    assert text.batch(0, 0).document_labels is None
    assert text.groups(0) == len(text.lengths(0))


@pytest.mark.parametrize(
    ("on_long", "found"),
    [
        (OnLong.drop, None),
        (OnLong.error, "group 2 has 9 tokens.* data.on_long to drop"),
        (OnLong.split, "group 2 has 9 tokens.*now split: a group is not cut"),
        (OnLong.truncate, "now truncate: a group is not cut"),
    ],
)
def test_too_long_groups_are_dropped_or_refused_as_a_whole(on_long, found):
    t = grouped([TAUGHT[:2], TAUGHT[:3], TAUGHT[:1]])
    if found is None:
        plan = training([t], sequence_length=8, on_long=on_long)
        assert {group for step in taken(plan) for _, group in step} == {0, 2}
        assert plan.summary()["dropped"] == 1
        return
    with pytest.raises(DataError, match=found):
        training([t], sequence_length=8, on_long=on_long)


def test_without_packing_a_document_and_not_the_group_must_fit_a_row():
    plan = training([grouped([TAUGHT[:3]] * 4)], micro=3, step=6, packing=False, sequence_length=4)
    assert plan.batch(0, 0).input_ids.shape == (3, 3)
    assert plan.documents_per_step == 6


def test_unpacked_groups_need_one_size_and_micro_batches_of_whole_groups():
    with pytest.raises(DataError, match=r"Groups of 2 and 3 documents.*data\.packing=true"):
        training([grouped([TAUGHT[:2], TAUGHT[:3]])], micro=6, step=6, packing=False, sequence_length=8)
    with pytest.raises(ConfigError, match=r"train\.micro_batch_size=4.*multiple of 3"):
        training([grouped([TAUGHT[:3]] * 4)], micro=4, step=4, packing=False, sequence_length=8)
    with pytest.raises(ConfigError, match=r"parallel\.context=1"):
        training([grouped([TAUGHT[:3]] * 4)], sequence_length=LENGTH).with_row_piece(0, 2)


def test_copies_are_copies_of_whole_groups():
    first, second = [([1, 2, 3], [True] * 3), ([4, 5], [True] * 2)], [([1, 2, 3], [True] * 3), ([6, 7], [True] * 2)]
    t = grouped([first, second, first, second, first[:1]])
    assert first_copies(t.by_group, np.zeros(0, np.uint64)).tolist() == [True, True, False, False, True]
    plan = training([t], sequence_length=LENGTH, dedup=Dedup.exact)
    assert Counter(name for step in taken(plan) for name in step) == Counter([(0, 0), (0, 1), (0, 4)])
    assert "2 of 5 groups are copies of others" in " ".join(training([t], sequence_length=LENGTH).notes())


def test_near_copies_are_decided_for_the_group(tmp_path):
    draw = np.random.default_rng(0)
    question, answer, other = (draw.integers(1, 30_000, 60).tolist() for _ in range(3))
    edited = [*answer[:30], 31_000, *answer[31:]]
    t = grouped(
        [
            [(part, [True] * 60) for part in pair]
            for pair in ((question, answer), (question, edited), (question, other))
        ]
    )
    found = find_duplicates([t], [], DataConfig(dedup=Dedup.near, dedup_similarity=0.7, cache_dir=str(tmp_path)))
    assert found.near.tolist() == [t.by_group.digests[1]]


def test_weights_need_supervised_tokens():
    labelled = grouped([[([1, 2], [False, False])] * 2] * 4, [1.0, 0.0] * 4)
    assert training([labelled], sequence_length=8).groups(0) == 4
    with pytest.raises(DataError, match="groups has no supervised tokens"):
        training([labelled, table([([1, 2], [True, True])], "text")], weights=[1, 1], sequence_length=8)
