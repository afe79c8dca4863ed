"""From groups of documents to segments, the units that rows are made of.

A segment is a group, or a part of a document that is longer than `data.sequence_length`. In supervised text each
document is a group by itself. The first token of a document follows nothing, so it is never a target. A segment
without a target and without a label teaches nothing; it is left out and counted.

This file also makes the random choices: the documents that are held out, by their content alone, and the permutations
of epochs. Both use a hash (SplitMix64: Steele, Lea, Flood 2014). A run that is resumed years later must get the same
batches, and the streams of numpy's generators may change between versions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import Optional

import numpy as np

from fxtune.data.config import OnLong
from fxtune.data.tokenized.table import TokenTable
from fxtune.errors import DataError

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_HOLD_OUT = np.uint64(0x66787475_6E652031)
_BLOCK = 1 << 24
"""Tokens whose targets are counted at a time, so that a large table is never in memory as a whole."""


class Side(Enum):
    """Which documents of a table to use."""

    train = "train"
    held_out = "held out"
    all = "all"


@dataclass(frozen=True)
class Segments:
    """int64 arrays with one entry a segment, in the order of the groups."""

    group: np.ndarray
    """Index of the group in its table."""
    start: np.ndarray
    """Position of the first token in the table's `ids`."""
    length: np.ndarray
    """Tokens that the segment takes in a row. A prompt that the row has once for two answers counts once."""
    supervised: np.ndarray
    """The number of targets: supervised tokens, except the first token of a document."""

    def __len__(self) -> int:
        return len(self.start)

    def take(self, segments: np.ndarray) -> Segments:
        return Segments(*(getattr(self, column.name)[segments] for column in fields(self)))

    @staticmethod
    def joined(parts: Sequence[Segments]) -> Segments:
        """The segments of all parts, one part after the other."""
        names = [column.name for column in fields(Segments)]
        return Segments(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


@dataclass(frozen=True)
class Spans:
    """The documents of segments, or their parts: int64 arrays, in the order of the segments."""

    source: np.ndarray
    """Index of the table."""
    document: np.ndarray
    """Index of the document in its table."""
    start: np.ndarray
    """Position in the table's `ids` of the first token of the document, or of its part, after the `shared` tokens."""
    length: np.ndarray
    segment: np.ndarray
    """Index of the document's segment among the segments, ascending from 0."""
    shared: np.ndarray
    """The number of tokens before `start` that the row has only in the group's first document (shared_prompts.py)."""

    def __len__(self) -> int:
        return len(self.start)


@dataclass(frozen=True)
class SegmentCounts:
    """Counts of what became of a table's groups. They are called documents here: most groups are one document."""

    documents: int
    """Documents on this side of the hold-out."""
    other_side: int
    """Documents on the other side."""
    split: int = 0
    """Documents split into several segments."""
    pieces: int = 0
    """The segments of the documents that were split."""
    truncated: int = 0
    dropped: int = 0
    """Documents left out because they are too long."""
    without_targets: int = 0
    """Segments left out because they have no target."""
    lost_tokens: int = 0
    """Tokens of long documents that were truncated or dropped."""
    overlapping: int = 0
    """Documents left out because they are held out as well (data.on_overlap=drop)."""


def make_segments(
    table: TokenTable,
    sequence_length: int,
    on_long: OnLong,
    on_side: np.ndarray,
    excluded: Optional[np.ndarray] = None,
    packing: bool = True,
    shared: Optional[np.ndarray] = None,
) -> tuple[Segments, SegmentCounts]:
    """The segments of some groups of a table, and counts. Each segment fits a row, and has a target or a label.

    `on_side`: a mask of the groups, bool. `excluded`: digests of groups to leave out. `packing`: whether a row has
    several documents; if not, a group takes a row for each of its documents. `shared`: shared_tokens(); None: rows
    have whole documents. Raises DataError if a document is too long with `on_long=error`, or if a group would have to
    be cut.
    """
    units = table.by_group
    offsets = np.asarray(units.offsets, dtype=np.int64)
    used = on_side if excluded is None else on_side & ~np.isin(units.digests, excluded)
    chosen = np.flatnonzero(used)
    length = np.diff(offsets)[chosen]
    saved = np.zeros(len(on_side), np.int64) if shared is None else np.add.reduceat(shared, table.groups[:-1])
    in_row = length - saved[chosen] if packing or not table.is_grouped else _longest_documents(table)[chosen]
    long = in_row > sequence_length
    if long.any() and (on_long is OnLong.error or (table.format.is_group and on_long is not OnLong.drop)):
        raise _too_long(table, sequence_length, on_long, chosen, in_row)
    lost = int((length[long] - (sequence_length if on_long is OnLong.truncate else 0)).sum())
    pieces = -(-length // sequence_length)
    if on_long is not OnLong.split or table.format.is_group:
        pieces = np.minimum(pieces, 1)
    if on_long is OnLong.drop:
        pieces[long] = 0
    group = np.repeat(chosen, pieces)
    nth = places_within(pieces)
    start = offsets[group] + nth * sequence_length
    size = offsets[group + 1] - start - saved[group]
    if table.is_grouped:
        targets, is_kept = _group_targets(table, group)
    else:
        size = np.minimum(size, sequence_length)
        size = before_images(table, start + size) - start
        targets = _count_targets(table.supervised, start, size)
        is_kept = targets > 0
    kept = np.flatnonzero(is_kept)
    many = int(long.sum())
    counts = {
        OnLong.split: dict(split=many, pieces=int(pieces[long].sum())),
        OnLong.truncate: dict(truncated=many, lost_tokens=lost),
        OnLong.drop: dict(dropped=many, lost_tokens=lost),
        OnLong.error: {},
    }[on_long]
    if table.split.chats:  # tokenization has split or shortened the long chats already
        of = table.split
        counts = dict(truncated=of.truncated, dropped=of.dropped, lost_tokens=of.lost_tokens)
        if of.pieces and not table.format.answers:
            counts |= dict(split=of.chats, pieces=of.pieces)
    segments = Segments(group[kept], start[kept], size[kept], targets[kept])
    counts |= dict(without_targets=len(targets) - len(kept), overlapping=int(on_side.sum()) - len(chosen))
    return segments, SegmentCounts(len(chosen), len(on_side) - int(on_side.sum()), **counts)


def _too_long(
    table: TokenTable, sequence_length: int, on_long: OnLong, chosen: np.ndarray, length: np.ndarray
) -> DataError:
    """The error for groups with more tokens than a row. `length`: the tokens of each of the groups `chosen`."""
    long = length > sequence_length
    first = int(np.argmax(long))
    noun, cures, twin = "document", "split, truncate or drop", ""
    if table.format.is_group:
        noun, cures = table.format.noun.removesuffix("s"), "drop"
        if table.format.answers:
            cures = "drop, or to truncate, which cuts the beginning of its prompt"
            twin = " with its mismatched answer" * (
                len(table) > len(table.by_group) and len(table.format.answers) == 1
            )
        if on_long is not OnLong.error:
            cures += f" (now {on_long.value}: a group is not cut)"
    return DataError(
        f"{table.name}: {noun} {chosen[first] + 1}{twin} has {length[first]:,} tokens, "
        f"{table.format.row_limit} is {sequence_length:,}, and {long.sum():,} of {len(long):,} {noun}s "
        f"are longer than that. Raise data.sequence_length, or set data.on_long to {cures}."
    )


def _longest_documents(table: TokenTable) -> np.ndarray:
    """Tokens of the longest document of each group, int64 [groups]."""
    return np.maximum.reduceat(np.diff(table.offsets), table.groups[:-1])


def _group_targets(table: TokenTable, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(the number of targets of each of `groups`, whether the group has a target or a label)."""
    size = table.groups[groups + 1] - table.groups[groups]
    of = np.repeat(np.arange(len(groups)), size)
    document = table.groups[groups][of] + places_within(size)
    start = np.asarray(table.offsets)[document]
    targets = _count_targets(table.supervised, start, np.asarray(table.offsets)[document + 1] - start)
    assert table.labels is not None
    teaches = (targets > 0) | ~np.isnan(table.labels[document])
    total, teaching = (np.bincount(of, values, len(groups)) for values in (targets, teaches))
    return total.astype(np.int64), teaching > 0


def document_counts(tables: Sequence[TokenTable], source: np.ndarray, group: np.ndarray) -> np.ndarray:
    """The number of documents of each segment, int64 [segments]. `source`, `group`: each segment's table and group."""
    count = np.ones(len(group), np.int64)
    for at, table in enumerate(tables):
        if table.is_grouped:
            own = source == at
            count[own] = table.groups[group[own] + 1] - table.groups[group[own]]
    return count


def spans(
    tables: Sequence[TokenTable], source: np.ndarray, segments: Segments, shared: Optional[Sequence[np.ndarray]] = None
) -> Spans:
    """The documents of segments. `source`: the table of each segment. `shared`: shared_tokens() of each table, or
    None, as in make_segments()."""
    if not any(table.is_grouped for table in tables):
        whole = np.zeros(len(segments), np.int64)
        return Spans(source, segments.group, segments.start, segments.length, np.arange(len(segments)), whole)
    count = document_counts(tables, source, segments.group)
    of = np.repeat(np.arange(len(segments)), count)
    source, document = source[of], segments.group[of]
    start, length = segments.start[of], segments.length[of]
    within, before = places_within(count), np.zeros(len(of), np.int64)
    for at, table in enumerate(tables):
        if table.is_grouped:
            own = source == at
            document[own] = table.groups[document[own]] + within[own]
            if shared is not None:
                before[own] = shared[at][document[own]]
            start[own] = table.offsets[document[own]] + before[own]
            length[own] = table.offsets[document[own] + 1] - start[own]
    return Spans(source, document, start, length, of, before)


def places_within(counts: np.ndarray) -> np.ndarray:
    """The numbers 0 to n - 1 for each n of `counts`, one after the other."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def cut(table: TokenTable, segments: Segments, length: int) -> tuple[Segments, np.ndarray]:
    """Cut `segments` of a table, all longer than `length`, into pieces of at most `length` tokens.

    A piece begins with the last token of the piece before it, so that no target is lost. Pieces without a target, or
    with a part of an image, are left out. Returns the pieces, and the number of pieces of each segment, int64.
    """
    pieces = -(-(segments.length - 1) // (length - 1))
    of = np.repeat(np.arange(len(segments)), pieces)
    nth = places_within(pieces)
    start = segments.start[of] + nth * (length - 1)
    size = np.minimum(segments.start[of] + segments.length[of] - start, length)
    targets = _count_targets(table.supervised, start, size)
    ends = start + size
    is_whole = (before_images(table, start) == start) & (before_images(table, ends) == ends)
    kept = np.flatnonzero((targets > 0) & is_whole)
    found = Segments(segments.group[of[kept]], start[kept], size[kept], targets[kept])
    return found, np.bincount(of[kept], minlength=len(segments))


def before_images(table: TokenTable, positions: np.ndarray) -> np.ndarray:
    """`positions` in the table's `ids`, int64. A position inside an image is moved to the image's start."""
    if table.images is None:
        return positions
    starts = np.asarray(table.images["start"])
    nearest = np.maximum(np.searchsorted(starts, positions) - 1, 0)
    is_inside = (starts[nearest] < positions) & (positions < starts[nearest] + table.images["tokens"][nearest])
    return np.where(is_inside, starts[nearest], positions)


def permutation(count: int, *key: int) -> np.ndarray:
    """A permutation of `count` items, int64, that depends on `key` alone."""
    state = np.zeros(1, np.uint64)
    for part in key:
        state = splitmix64(state + np.array([part % (1 << 64)], np.uint64))
    return np.argsort(splitmix64(state + np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN))


def splitmix64(state: np.ndarray) -> np.ndarray:
    """One step of SplitMix64, a bijection on uint64 [...]."""
    state = state + _GOLDEN
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def is_on_side(side: Side, digests: np.ndarray, eval_fraction: float, limit: Optional[int] = None) -> np.ndarray:
    """A mask of the documents on `side`, bool. Only their `digests` decide, so equal documents are on the same side
    with every seed. `limit`: take at most this many held-out documents, by the smallest hashes. Without effect if
    everything is held out."""
    if side is Side.all or eval_fraction == 0:
        return np.full(len(digests), side is not Side.held_out)
    if eval_fraction == 1:
        return np.full(len(digests), side is Side.held_out)
    number = hold_out_number(digests)
    chosen = (number < np.uint64(eval_fraction * 2.0**64)) == (side is Side.held_out)
    if limit is not None and chosen.sum() > limit:
        chosen[np.argsort(number, kind="stable")[limit:]] = False
    return chosen


def hold_out_number(digests: np.ndarray) -> np.ndarray:
    """A uint64 for each document, by its content alone. An eval_fraction of f holds out numbers below f x 2**64."""
    return splitmix64(np.asarray(digests, dtype=np.uint64) ^ _HOLD_OUT)


def _count_targets(supervised: np.ndarray, start: np.ndarray, length: np.ndarray) -> np.ndarray:
    """The number of targets of each segment, int64 [segments]: supervised tokens after its first token."""
    counts = np.zeros(len(start), np.int64)
    ends = start + length
    begin = 0
    while begin < len(start):
        end = max(int(np.searchsorted(ends, start[begin] + _BLOCK, side="right")), begin + 1)
        base = start[begin]
        tokens = np.append(np.asarray(supervised[base : ends[end - 1]]).view(np.uint8), np.uint8(0))
        bounds = np.stack([start[begin:end] + 1, ends[begin:end]], axis=1).ravel() - base
        counts[begin:end] = np.add.reduceat(tokens, bounds, dtype=np.int64)[::2]
        begin = end
    counts[length <= 1] = 0  # for an empty range reduceat returns the next element
    return counts
