"""A row has the prompt of a group of answers once: the same documents, each token computed once, each target at its place."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tables import grouped, training

from fxtune.data.batches.batch import IGNORE_INDEX
from fxtune.data.batches.shared_prompts import shared_tokens
from fxtune.data.config import OnLong
from fxtune.errors import DataError

LENGTH = 96


@st.composite
def pairs(draw):
    """A table of one to four answers to each prompt, whose documents begin alike; some answers begin alike, too."""
    tokens = st.integers(1, 9)
    groups = []
    for _ in range(draw(st.integers(1, 12))):
        prompt = draw(st.lists(tokens, max_size=12))
        group = []
        for _ in range(draw(st.integers(1, 4))):
            between, answer = draw(st.lists(tokens, max_size=2)), draw(st.lists(tokens, min_size=2, max_size=8))
            marks = [False] * len(prompt + between) + [True] * len(answer)
            group.append(([*prompt, *between, *answer], marks))
        groups.append(group)
    return grouped(groups)


def common(one, other) -> int:
    """Tokens that both documents begin with and neither learns."""
    places = zip(*one, *other, strict=False)
    return next(
        (at for at, (first, learned, second, marked) in enumerate(places) if first != second or learned or marked),
        min(len(one[0]), len(other[0])),
    )


def document(table, index: int):
    span = slice(table.offsets[index], table.offsets[index + 1])
    return table.ids[span].tolist(), table.supervised[span].tolist()


def plan_of(table, **options):
    return training([table], micro=2, step=2, sequence_length=LENGTH, epochs=1, **options)


@settings(max_examples=25, deadline=None)
@given(table=pairs())
def test_later_documents_share_all_but_the_last_token_of_the_common_prompt(table):
    found = shared_tokens(table)
    for first, end in pairwise(table.groups.tolist()):
        assert found[first] == 0
        for later in range(first + 1, end):
            alike = common(document(table, first), document(table, later))
            assert found[later] == max(alike - 1, 0)


@settings(max_examples=25, deadline=None)
@given(table=pairs())
def test_keys_of_each_document_are_the_whole_document(table):
    plan = plan_of(table, share_prompts=True)
    seen = 0
    for step in range(plan.steps):
        batch, rows = plan.batch(step, 0), plan.contents(step, 0)
        flat, positions = batch.input_ids.flatten(), batch.position_ids.flatten()
        used = (batch.group_of >= 0).nonzero().flatten().tolist()
        for slot, piece in zip(used, (piece for row in rows for piece in row), strict=True):
            ids, learned = document(table, piece.document)
            keys = batch.key_index[batch.cu_seqlens_k[slot] : batch.cu_seqlens_k[slot + 1]]
            own = slice(batch.cu_seqlens[slot], batch.cu_seqlens[slot + 1])
            assert flat[keys].tolist() == ids, "the keys are the document"
            assert flat[own].tolist() == ids[piece.shared :], "the row has the rest of it"
            assert positions[own].tolist() == list(range(piece.shared, len(ids)))
            assert positions[keys].tolist() == list(range(len(ids)))
            targets = batch.targets.flatten()[own].tolist()
            expected = [token if mark else IGNORE_INDEX for token, mark in zip(ids, learned, strict=True)]
            assert targets == [*expected[piece.shared + 1 :], IGNORE_INDEX]
            seen += 1
        assert len(batch.supervised_at.unique()) == len(batch.supervised_at) == plan.supervised(step)
        sums = batch.document_sums(batch.labels.double())
        lengths = batch.document_sums((batch.labels > 0).double())
        for slot, piece in zip(used, (piece for row in rows for piece in row), strict=True):
            ids, learned = document(table, piece.document)
            answer = [token for token, mark in zip(ids[1:], learned[1:], strict=True) if mark]
            assert (sums[slot], lengths[slot]) == (sum(answer), len(answer)), "each target counts for its document"
    assert seen == len(table), "each document once"


@settings(max_examples=20, deadline=None)
@given(table=pairs())
def test_each_key_finds_the_way_back_to_its_token(table):
    plan = plan_of(table, share_prompts=True)
    for step in range(plan.steps):
        batch = plan.batch(step, 0)
        count = int(batch.cu_seqlens_k[-1])
        assert len(batch.key_copies) == max(np.diff(table.groups))
        back = [[] for _ in range(batch.input_ids.numel())]
        for key, token in enumerate(batch.key_index[:count].tolist()):
            back[token].append(key)
        found = [sorted(key for key in keys if key >= 0) for keys in batch.key_copies.T.tolist()]
        assert found == back


@settings(max_examples=20, deadline=None)
@given(table=pairs())
def test_a_step_has_the_same_documents_in_fewer_tokens(table):
    whole, once = plan_of(table), plan_of(table, share_prompts=True)
    for plan in (whole, once):
        summary = plan.summary()
        lengths = np.concatenate([plan.lengths(step) for step in range(plan.steps)])
        shared = np.concatenate([plan.shared(step) for step in range(plan.steps)])
        assert sorted(lengths) == sorted(np.diff(table.offsets)), "lengths are of whole documents"
        assert summary["tokens"] == lengths.sum() == len(table.ids)
        assert summary["computed_tokens"] == (lengths - shared).sum()
        computed = sum(plan.batch(step, 0).tokens for step in range(plan.steps))
        assert computed == summary["computed_tokens"]
    assert whole.summary()["computed_tokens"] == len(table.ids)
    assert once.summary()["computed_tokens"] == len(table.ids) - shared_tokens(table).sum()


def test_the_number_of_keys_is_the_same_for_all_batches():
    draw = np.random.default_rng(0)
    groups = []
    for _ in range(200):
        prompt = draw.integers(1, 9, draw.integers(2, 16)).tolist()
        answers = [draw.integers(1, 9, draw.integers(2, 8)).tolist() for _ in range(2)]
        groups.append([(prompt + answer, [False] * len(prompt) + [True] * len(answer)) for answer in answers])
    plan = plan_of(grouped(groups), share_prompts=True)
    assert len({plan.batch(step, 0).key_index.shape for step in range(plan.steps - 1)}) == 1


def test_a_pair_that_fits_only_with_one_prompt_is_kept():
    prompt = ([3] * 60, [False] * 60)
    pair = [([*prompt[0], token], [*prompt[1], True]) for token in (1, 2)]
    table = grouped([pair])
    assert plan_of(table, share_prompts=True).batch(0, 0).tokens == 63
    with pytest.raises(DataError, match="1 dropped"):
        plan_of(table, on_long=OnLong.drop)


def test_plans_without_it_have_the_fingerprint_of_earlier_versions():
    table = grouped([[([1, 2, 3, 4], [False, False, True, True])] * 2] * 4)
    whole, once = plan_of(table), plan_of(table, share_prompts=True)
    assert whole.fingerprint == plan_of(table, share_prompts=False).fingerprint != once.fingerprint
