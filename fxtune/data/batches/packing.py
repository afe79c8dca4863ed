"""Packs documents into rows of a fixed capacity with almost no padding.

The algorithm is best-fit decreasing: it takes the documents from the longest to the shortest, and puts each into the
fullest row that has room. Only lengths matter, so this file works on a histogram of lengths (LPFHP in Krell et al.
2021, "Efficient Sequence Packing without Cross-contamination", arXiv 2107.02027): all documents of one length are
placed together, and rows with the same room left are one entry with a count. The paper's placement is an
approximation of best-fit decreasing; this one is exact.

Packing has two steps. packing_pattern() decides from the lengths alone which lengths share a row. assign_documents()
gives each slot of this pattern a document. Each epoch assigns documents by another permutation.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple, Optional

import numpy as np


class _Fill(NamedTuple):
    """The content of a row, as a linked list that all rows with the same content share."""

    before: Optional[_Fill]
    length: int
    copies: int


def packing_pattern(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """(`slots`, `offsets`), int64: row r has one document of each length in `slots[offsets[r]:offsets[r + 1]]`,
    longest first. `lengths`: integers [documents]. Raises ValueError for a length outside 1..capacity."""
    lengths = np.asarray(lengths)
    if lengths.size == 0:
        return np.zeros(0, np.int64), np.zeros(1, np.int64)
    if lengths.min() < 1 or lengths.max() > capacity:
        raise ValueError(f"lengths from {lengths.min()} to {lengths.max()} do not fit rows of {capacity}")
    histogram = np.bincount(lengths)
    present = np.flatnonzero(histogram)[::-1]
    rows = _OpenRows()
    for length, count in zip(present.tolist(), histogram[present].tolist(), strict=True):
        _place(length, count, capacity, rows)
    return _unroll([group for groups in rows.groups.values() for group in groups])


def assign_documents(lengths: np.ndarray, slots: np.ndarray, order: Optional[np.ndarray] = None) -> np.ndarray:
    """The document of each slot, int64 [slots]. Documents of equal length are taken in the order of `order`, a
    permutation; None: in the order of `lengths`."""
    if order is None:
        order = np.arange(len(lengths))
    documents = np.empty(len(slots), np.int64)
    documents[np.argsort(slots, kind="stable")] = order[np.argsort(np.asarray(lengths)[order], kind="stable")]
    return documents


class _OpenRows:
    """Rows by the room left in them: {room: [(content, number of rows)]}, and the rooms in ascending order."""

    def __init__(self) -> None:
        self.groups: dict[int, list[tuple[Optional[_Fill], int]]] = {}
        self.ascending: list[int] = []

    def add(self, room: int, fill: Optional[_Fill], rows: int) -> None:
        if room not in self.groups:
            self.groups[room] = []
            insort(self.ascending, room)
        self.groups[room].append((fill, rows))

    def take(self, length: int) -> Optional[tuple[int, Optional[_Fill], int]]:
        """Remove equal rows with the least room that still holds `length`. Returns (room, content, number of rows);
        None if no row has room."""
        at = bisect_left(self.ascending, length)
        if at == len(self.ascending):
            return None
        room = self.ascending[at]
        fill, rows = self.groups[room].pop()
        if not self.groups[room]:
            del self.groups[room], self.ascending[at]
        return room, fill, rows


def _place(length: int, count: int, capacity: int, open_rows: _OpenRows) -> None:
    """Place `count` documents of one length, best fit first. Open new rows when none has room."""
    while count:
        room, fill, rows = open_rows.take(length) or (capacity, None, count)
        each = room // length
        full = min(rows, count // each)
        if full:
            open_rows.add(room - each * length, _Fill(fill, length, each), full)
            count -= full * each
            rows -= full
        if count and rows:  # the documents that are left do not fill one row
            open_rows.add(room - count * length, _Fill(fill, length, count), 1)
            rows -= 1
            count = 0
        if rows and fill is not None:
            open_rows.add(room, fill, rows)


def _unroll(groups: list[tuple[Optional[_Fill], int]]) -> tuple[np.ndarray, np.ndarray]:
    """(slots, offsets) for packing_pattern(), of groups of equal rows: (content, number of rows)."""
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
    slots = np.repeat(np.asarray(lengths), counts)  # one row of each group
    size = np.add.reduceat(np.asarray(counts), starts)
    start = np.cumsum(size) - size
    group = np.repeat(np.arange(len(groups)), [rows for _, rows in groups])
    offsets = np.concatenate([[0], np.cumsum(size[group])])
    within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], size[group])
    return slots[np.repeat(start[group], size[group]) + within], offsets
