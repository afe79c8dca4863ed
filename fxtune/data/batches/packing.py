"""Documents into rows of a fixed capacity, with next to nothing left over.

Best-fit decreasing: the documents from the longest to the shortest, each into the fullest row that still has room.
Done one document at a time that is millions of searches; but only lengths matter, so it is done on the histogram of
lengths (LPFHP in Krell et al. 2021, "Efficient Sequence Packing without Cross-contamination", arXiv 2107.02027): all
documents of one length are placed together, and rows with the same room left are one entry with a count. Unlike the
paper's, our placement is exactly best-fit decreasing: a row takes as many documents of one length as fit before the
next row is looked at.

What it costs: time grows with the number of *different* (row, length) pairs, not with the number of documents; a
million documents take a fraction of a second. What it gives: 99 % and more of the rows filled on natural mixes of
lengths (scripts/bench/bench_packing.py prints both).

The result has two halves, because only the first depends on the lengths alone: the *pattern* (which lengths share a
row) and which document takes which slot, which the caller decides anew in each epoch by a permutation.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple, Optional

import numpy as np

Rows = tuple[np.ndarray, np.ndarray]


class _Fill(NamedTuple):
    """What a row holds, as a chain back to the empty row, shared by all rows that are filled alike."""

    before: Optional[_Fill]
    length: int
    copies: int


def pattern(lengths: np.ndarray, capacity: int) -> Rows:
    """Which lengths share a row.

    `lengths`: integers [documents], each in 1..capacity. Returns (`slots`, `offsets`), int64: row r holds one document
    of each length in `slots[offsets[r]:offsets[r + 1]]`, longest first. ValueError for a length outside 1..capacity.
    """
    lengths = np.asarray(lengths)
    if lengths.size == 0:
        return np.zeros(0, np.int64), np.zeros(1, np.int64)
    if lengths.min() < 1 or lengths.max() > capacity:
        raise ValueError(f"lengths from {lengths.min()} to {lengths.max()} do not fit rows of {capacity}")
    histogram = np.bincount(lengths)
    present = np.flatnonzero(histogram)[::-1]
    rooms = _Rooms()
    for length, count in zip(present.tolist(), histogram[present].tolist(), strict=True):
        _place(length, count, capacity, rooms)
    return _unroll([group for groups in rooms.groups.values() for group in groups])


def assign(lengths: np.ndarray, slots: np.ndarray, order: Optional[np.ndarray] = None) -> np.ndarray:
    """Give each slot a document of its length, documents of equal length in the order that `order` lists them.

    `order`: a permutation of the documents, or None for their own order. Returns the documents' indices, int64 [slots].
    """
    if order is None:
        order = np.arange(len(lengths))
    documents = np.empty(len(slots), np.int64)
    documents[np.argsort(slots, kind="stable")] = order[np.argsort(np.asarray(lengths)[order], kind="stable")]
    return documents


def pack(lengths: np.ndarray, capacity: int, order: Optional[np.ndarray] = None) -> Rows:
    """Pack documents into as few rows as best-fit decreasing needs.

    Returns (`documents`, `offsets`), int64: row r holds the documents `documents[offsets[r]:offsets[r + 1]]`, whose
    lengths sum to at most `capacity`; each document is in exactly one row. `order` as in `assign`; ValueError as in
    `pattern`.
    """
    slots, offsets = pattern(lengths, capacity)
    return assign(lengths, slots, order), offsets


class _Rooms:
    """Rows by the room they have left: {room: [(fill, how many rows)]}, and the rooms in ascending order."""

    def __init__(self) -> None:
        self.groups: dict[int, list[tuple[Optional[_Fill], int]]] = {}
        self.ascending: list[int] = []

    def add(self, room: int, fill: Optional[_Fill], rows: int) -> None:
        if room not in self.groups:
            self.groups[room] = []
            insort(self.ascending, room)
        self.groups[room].append((fill, rows))

    def take(self, length: int) -> Optional[tuple[int, Optional[_Fill], int]]:
        """Remove and return the (room, fill, rows) with the least room of at least `length`."""
        at = bisect_left(self.ascending, length)
        if at == len(self.ascending):
            return None
        room = self.ascending[at]
        fill, rows = self.groups[room].pop()
        if not self.groups[room]:
            del self.groups[room], self.ascending[at]
        return room, fill, rows


def _place(length: int, count: int, capacity: int, rooms: _Rooms) -> None:
    """Place `count` documents of one length, best fit first; open new rows where none has room."""
    while count:
        room, fill, rows = rooms.take(length) or (capacity, None, count)
        each = room // length
        full = min(rows, count // each)
        if full:
            rooms.add(room - each * length, _Fill(fill, length, each), full)
            count -= full * each
            rows -= full
        if count and rows:  # fewer documents are left than one row takes
            rooms.add(room - count * length, _Fill(fill, length, count), 1)
            rows -= 1
            count = 0
        if rows and fill is not None:
            rooms.add(room, fill, rows)


def _unroll(groups: list[tuple[Optional[_Fill], int]]) -> Rows:
    """From groups of equal rows to one entry a slot."""
    lengths: list[int] = []
    counts: list[int] = []
    starts = []
    for fill, _ in groups:
        first = len(lengths)
        starts.append(first)
        while fill is not None:
            lengths.append(fill.length)
            counts.append(fill.copies)
            fill = fill.before
        lengths[first:] = lengths[first:][::-1]
        counts[first:] = counts[first:][::-1]
    per_part = np.asarray(counts)
    slots = np.repeat(np.asarray(lengths), per_part)  # each group's row, once
    size = np.add.reduceat(per_part, starts)
    start = np.cumsum(size) - size
    group = np.repeat(np.arange(len(groups)), [rows for _, rows in groups])
    offsets = np.concatenate([[0], np.cumsum(size[group])])
    within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], size[group])
    return slots[np.repeat(start[group], size[group]) + within], offsets
