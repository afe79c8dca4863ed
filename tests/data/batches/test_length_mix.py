"""Short and long documents together: each step has its share, nothing drifts, and the plan keeps its other properties."""

from __future__ import annotations

import pickle
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tables import Table, table, training

from fxtune.data.batches.build import plan_evaluation
from fxtune.data.batches.length_mix import balanced_order
from fxtune.data.batches.plan import Plan
from fxtune.data.config import DataConfig, MixConfig, SourceConfig
from fxtune.errors import DataError

LENGTH = 64
law = settings(max_examples=15)


def documents(*lengths: int) -> Table:
    return table([([index % 500 + 1] * length, [True] * length) for index, length in enumerate(lengths)])


def mixed(tables, share: float, threshold: int = 16, **options) -> Plan:
    return training(tables, mix=MixConfig(share, threshold), **{"sequence_length": LENGTH, **options})


def lengths_of(plan: Plan, step: int) -> list[int]:
    """Tokens of each segment of a step."""
    return [
        piece.length
        for micro in range(plan.micro_batches(step))
        for row in plan.contents(step, micro)
        for piece in row
    ]


# Each has at least one document of each kind, for a threshold of 16.
lengths = st.lists(st.integers(2, 150), min_size=1, max_size=60).map(lambda found: [*found, 5, 40])
supply = st.lists(lengths, min_size=1, max_size=2).map(lambda found: [documents(*each) for each in found])
shares = st.floats(0.02, 0.98)
rows = st.integers(1, 80).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(1, 50), min_size=n, max_size=n),
        st.lists(st.floats(0, 1), min_size=n, max_size=n),
        st.permutations(range(n)),
    )
)


@law
@given(rows)
def test_every_stretch_of_rows_is_within_one_row_of_the_share(drawn):
    tokens, order = np.array(drawn[0]), np.array(drawn[2])
    long = (tokens * np.array(drawn[1])).astype(np.int64)
    result = balanced_order(long, tokens, order)
    assert sorted(result.tolist()) == list(range(len(tokens)))
    total, share = int(tokens.sum()), int(long.sum())
    ahead = np.concatenate([[0], np.cumsum(long[result] * total - tokens[result] * share)])
    assert ahead.max() - ahead.min() <= tokens.max() * total  # for all pairs of a start and an end
    assert ahead[-1] == 0


def test_equal_rows_keep_the_given_order():
    long, tokens = np.array([8, 0, 8, 0, 8, 0]), np.full(6, 8)
    assert balanced_order(long, tokens, np.array([5, 4, 3, 2, 1, 0])).tolist() == [4, 5, 2, 3, 0, 1]
    assert balanced_order(np.zeros(3, int), np.full(3, 8), np.array([2, 0, 1])).tolist() == [2, 0, 1]


@law
@given(supply, shares, st.booleans(), st.sampled_from([(1, 1), (1, 4), (2, 8)]), st.integers(0, 2**40))
def test_each_step_is_within_one_row_of_its_epochs_share(tables, share, packing, sizes, seed):
    """Wherever the step begins, also across the end of an epoch, and in whatever order the steps are requested."""
    plan = mixed(tables, share, micro=sizes[0], step=sizes[1], packing=packing, seed=seed, epochs=3)
    stream, of = plan.stream, plan.stream.segments
    wanted = {
        number: int(of.length[(found := stream.epoch(number).segments)[stream.long[found]]].sum())
        / int(of.length[found].sum())
        for number in range(4)
    }
    for step in np.random.default_rng(0).permutation(plan.steps).tolist():
        pieces = lengths_of(plan, step)
        assert plan.tokens(step) == sum(pieces)
        first = step * sizes[1]
        by_epoch = Counter()
        for row in range(first, min(first + sizes[1], plan._row_count)):
            segments, _ = stream.rows(row, row + 1)
            by_epoch[stream.locate(row)[0]] += int(of.length[segments].sum())
        seen = [wanted[number] for number in by_epoch]
        expected = sum(wanted[number] * tokens for number, tokens in by_epoch.items())
        assert (
            abs(sum(length for length in pieces if length > 16) - expected)
            <= LENGTH * (1 + max(seen) - min(seen)) + 1e-6
        )


@law
@given(supply, shares, st.booleans())
def test_epochs_have_the_declared_share_and_repeat_a_document_last(tables, share, packing):
    """No document is repeated before all of its kind were used."""
    stream = mixed(tables, share, packing=packing).stream
    length, total = stream.segments.length, int(stream.segments.length.sum())
    counts, long, tokens = Counter(), 0, 0
    for number in range(5):
        epoch = stream.epoch(number)
        assert len(epoch) > 0
        counts.update(epoch.segments.tolist())
        long += int(length[epoch.segments[stream.long[epoch.segments]]].sum())
        tokens += int(length[epoch.segments].sum())
        assert abs(long - share * total * (number + 1)) <= LENGTH + 1  # the last document is not split
        assert abs(tokens - total * (number + 1)) <= LENGTH + 16 + 2
        for kind in (stream.long, ~stream.long):
            mine = [counts[segment] for segment in np.flatnonzero(kind).tolist()]
            assert max(mine) - min(mine) <= 1


@law
@given(supply, shares, st.booleans())
def test_mixed_batch_is_a_function_of_plan_and_step(tables, share, packing):
    plan, again = (mixed(tables, share, packing=packing, epochs=2.5) for _ in range(2))
    copied = pickle.loads(pickle.dumps(plan))
    assert plan.fingerprint == again.fingerprint == copied.fingerprint
    for step in range(plan.steps - 1, -1, -1):
        assert plan.contents(step, 0) == again.contents(step, 0) == copied.contents(step, 0)
    for a, b in pairwise(plan.stream.rows(0, 3)[1].tolist()):
        assert int(plan.stream.segments.length[plan.stream.rows(0, 3)[0][a:b]].sum()) <= LENGTH


def test_fingerprint_depends_on_the_mix_and_is_unchanged_without_one():
    data = [documents(*[40] * 10, *[8] * 50)]
    prints = [
        mixed(data, 0.5).fingerprint,
        mixed(data, 0.6).fingerprint,
        mixed(data, 0.5, threshold=17).fingerprint,
        training(data, sequence_length=LENGTH).fingerprint,
    ]
    assert len(set(prints)) == 4
    assert training(data, sequence_length=LENGTH, mix=MixConfig(None, 17)).fingerprint == prints[3]
    assert prints[3] == "c773476eedd9a35d2572ebd77c15c2d2"  # as before there was a mix
    assert mixed(data, 0.5, max_steps=3).fingerprint == prints[0]


def test_an_evaluation_is_not_mixed():
    data = [documents(*[40] * 10, *[8] * 50)]
    config = DataConfig(
        sources=[SourceConfig(path="a")], eval_fraction=0.5, sequence_length=LENGTH, mix=MixConfig(0.9, 16)
    )
    plan = plan_evaluation(data, config, micro_batch_size=2, shares=[0.5])
    assert Counter(plan.stream.epoch(0).segments.tolist()) == Counter(range(len(plan.stream.segments)))
    assert plan.summary()["mix"] is None


def test_mix_without_long_or_short_documents_is_an_error():
    with pytest.raises(
        DataError,
        match=r"threshold=50: no document is longer \(the longest has 40 tokens after data.on_long was applied",
    ):
        mixed([documents(40, 8)], 0.5, threshold=50)
    with pytest.raises(DataError, match=r"threshold=7: every document is longer, so there are no short ones"):
        mixed([documents(40, 8)], 0.5, threshold=7)
    assert mixed([documents(40, 8)], 0.5, threshold=8).steps >= 1
