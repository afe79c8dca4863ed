from bisect import bisect_left, insort
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxtune.data.batches import packing
from fxtune.data.batches.packing import assign_documents, packing_pattern

CAPACITY = 64
documents = st.lists(st.integers(1, CAPACITY), min_size=1, max_size=200).map(np.array)


def pack(lengths: np.ndarray, capacity: int, order: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """(documents, offsets): row r holds documents[offsets[r]:offsets[r + 1]]."""
    slots, offsets = packing_pattern(lengths, capacity)
    return assign_documents(lengths, slots, order), offsets


def naive_rows(lengths: np.ndarray, capacity: int) -> int:
    """Rows that best-fit decreasing needs, one document at a time."""
    rooms: list[int] = []
    rows = 0
    for length in sorted(lengths.tolist(), reverse=True):
        at = bisect_left(rooms, length)
        room = rooms.pop(at) if at < len(rooms) else capacity
        rows += at == len(rooms) and room == capacity
        insort(rooms, room - length)
    return rows


@given(documents)
def test_every_document_is_in_one_row_and_no_row_is_too_full(lengths):
    docs, offsets = pack(lengths, CAPACITY)
    assert sorted(docs.tolist()) == list(range(len(lengths)))
    assert offsets[0] == 0
    assert offsets[-1] == len(docs)
    rows = [lengths[docs[a:b]].tolist() for a, b in pairwise(offsets)]
    assert all(row and sum(row) <= CAPACITY for row in rows)
    assert all(row == sorted(row, reverse=True) for row in rows)


@given(documents)
def test_rows_equal_naive_best_fit_decreasing(lengths):
    assert len(pack(lengths, CAPACITY)[1]) - 1 == naive_rows(lengths, CAPACITY)


@given(documents, st.integers(0, 2**32 - 1))
def test_permutation_moves_documents_and_keeps_the_pattern(lengths, seed):
    order = np.random.default_rng(seed).permutation(len(lengths))
    docs, offsets = pack(lengths, CAPACITY, order)
    slots, expected = packing_pattern(lengths, CAPACITY)
    assert (offsets == expected).all()
    assert (lengths[docs] == slots).all()
    assert sorted(docs.tolist()) == list(range(len(lengths)))
    again, _ = packing_pattern(lengths[order], CAPACITY)  # a histogram has no order
    assert (again == slots).all()


def test_equal_documents_take_slots_in_permutation_order():
    lengths = np.full(6, 10)
    assert pack(lengths, 20, np.array([5, 3, 1, 0, 2, 4]))[0].tolist() == [5, 3, 1, 0, 2, 4]
    assert pack(lengths, 20)[0].tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(("sigma", "capacity"), [(0.5, 4096), (1.0, 4096), (1.5, 4096), (1.0, 16384), (1.0, 2048)])
def test_log_normal_lengths_fill_rows(sigma, capacity):
    draw = np.random.default_rng(0).lognormal(np.log(500) - sigma**2 / 2, sigma, 20_000)
    lengths = np.clip(draw.astype(int), 1, capacity)
    docs, offsets = pack(lengths, capacity)
    fill = np.add.reduceat(lengths[docs], offsets[:-1])
    assert fill.max() <= capacity
    assert lengths.sum() / ((len(offsets) - 1) * capacity) >= 0.97
    assert Counter(docs.tolist()) == Counter(range(len(lengths)))


def test_work_grows_with_lengths_and_not_with_documents(monkeypatch):
    """Ten times as many documents of the same lengths take less than twice as many searches."""
    searches = Counter()
    take = packing._OpenRows.take

    def counted(rows, length):
        searches[count] += 1
        return take(rows, length)

    monkeypatch.setattr(packing._OpenRows, "take", counted)
    draw = np.random.default_rng(0).lognormal(np.log(500) - 0.5, 1.0, 100_000)
    for count in (1, 10):
        pack(np.repeat(np.clip(draw.astype(int), 1, 4096), count), 4096)
    assert searches[10] < 2 * searches[1] < 200_000


def test_empty_input_gives_no_rows_and_unfit_lengths_are_refused():
    assert [part.tolist() for part in pack(np.zeros(0, int), 8)] == [[], [0]]
    for wrong in (9, 0):
        with pytest.raises(ValueError, match="do not fit rows of 8"):
            pack(np.array([4, wrong]), 8)
