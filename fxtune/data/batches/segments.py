"""From documents to segments, the units that rows are made of.

A segment is a document, or a part of one that is longer than `data.sequence_length`. A segment's first token follows
nothing, so it is never a target. A segment without a target teaches nothing; it is left out and counted.

The random choices are made here too: the documents that are held out, by their content alone, and the permutations of
epochs. Both use a hash (SplitMix64: Steele, Lea, Flood 2014) and not numpy's generators, whose streams may change
between versions: a run resumed years later must get the same batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import TYPE_CHECKING, Optional

import numpy as np

from fxtune.data.config import OnLong
from fxtune.errors import DataError

if TYPE_CHECKING:
    from fxtune.data.tokenized.table import TokenTable

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_HOLD_OUT = np.uint64(0x66787475_6E652031)
_BLOCK = 1 << 24
"""Tokens whose targets are counted at a time, so that a large table is never in memory as a whole."""


class Side(Enum):
    """Which documents of a table to use: those for training, those held out for evaluation, or all."""

    train = "train"
    held_out = "held out"
    all = "all"


@dataclass(frozen=True)
class Segments:
    """int64 arrays with one entry a segment, in the order of the documents."""

    document: np.ndarray
    """Index of the document in its table."""
    start: np.ndarray
    """Position of the first token in the table's `ids`."""
    length: np.ndarray
    supervised: np.ndarray
    """Targets: supervised tokens other than the segment's first."""

    def __len__(self) -> int:
        return len(self.start)

    def take(self, segments: np.ndarray) -> Segments:
        """The segments with these indices."""
        return Segments(*(getattr(self, one.name)[segments] for one in fields(self)))

    @staticmethod
    def joined(parts: Sequence[Segments]) -> Segments:
        """The segments of all parts, one part after the other."""
        return Segments(*(np.concatenate([getattr(part, one.name) for part in parts]) for one in fields(Segments)))


@dataclass(frozen=True)
class SegmentCounts:
    """What became of a table's documents."""

    documents: int
    """Documents on this side of the hold-out."""
    other_side: int
    """Documents on the other side."""
    split: int = 0
    """Documents split into several segments."""
    pieces: int = 0
    """The segments that they became."""
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
) -> tuple[Segments, SegmentCounts]:
    """The segments of some documents of a table. Each has at most `sequence_length` tokens and at least one target.

    `on_side`: which documents, bool. `excluded`: digests of documents to leave out. The result may be empty. Raises
    DataError if `on_long=error` and a document is too long.
    """
    offsets = np.asarray(table.offsets, dtype=np.int64)
    used = on_side if excluded is None else on_side & ~np.isin(table.digests, excluded)
    chosen = np.flatnonzero(used)
    length = np.diff(offsets)[chosen]
    long = length > sequence_length
    if on_long is OnLong.error and long.any():
        first = int(np.argmax(long))
        raise DataError(
            f"{table.name}: document {chosen[first]} (counted from 0) has {length[first]:,} tokens, "
            f"data.sequence_length is {sequence_length:,}, and {long.sum():,} of {len(long):,} documents "
            "are longer than that. Raise data.sequence_length, or set data.on_long to split, truncate or drop."
        )
    lost = int((length[long] - (sequence_length if on_long is OnLong.truncate else 0)).sum())
    pieces = -(-length // sequence_length)
    if on_long is not OnLong.split:
        pieces = np.minimum(pieces, 1)
    if on_long is OnLong.drop:
        pieces[long] = 0
    document = np.repeat(chosen, pieces)
    nth = np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    start = offsets[document] + nth * sequence_length
    size = np.minimum(offsets[document + 1] - start, sequence_length)
    targets = _count_targets(table.supervised, start, size)
    kept = np.flatnonzero(targets)
    many = int(long.sum())
    counts = {
        OnLong.split: dict(split=many, pieces=int(pieces[long].sum())),
        OnLong.truncate: dict(truncated=many, lost_tokens=lost),
        OnLong.drop: dict(dropped=many, lost_tokens=lost),
        OnLong.error: {},
    }[on_long]
    if table.split.chats:  # they are pieces already
        of = table.split
        counts = dict(split=of.chats, pieces=of.pieces, truncated=of.truncated, lost_tokens=of.lost_tokens)
    segments = Segments(document[kept], start[kept], size[kept], targets[kept])
    counts |= dict(without_targets=len(targets) - len(kept), overlapping=int(on_side.sum()) - len(chosen))
    return segments, SegmentCounts(len(chosen), len(on_side) - int(on_side.sum()), **counts)


def cut(table: TokenTable, segments: Segments, length: int) -> tuple[Segments, np.ndarray]:
    """`segments` of a table, which are longer than `length`, as pieces of at most `length` tokens.

    A piece begins with the last token of the one before it, so that no target is lost. Pieces without a target are
    left out. Returns the pieces, and how many each segment has: int64 [segments].
    """
    pieces = -(-(segments.length - 1) // (length - 1))
    of = np.repeat(np.arange(len(segments)), pieces)
    nth = np.arange(len(of)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    start = segments.start[of] + nth * (length - 1)
    size = np.minimum(segments.start[of] + segments.length[of] - start, length)
    targets = _count_targets(table.supervised, start, size)
    kept = np.flatnonzero(targets)
    found = Segments(segments.document[of[kept]], start[kept], size[kept], targets[kept])
    return found, np.bincount(of[kept], minlength=len(segments))


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
    """Which documents are on `side`, bool [documents]; equal ones are on the same side, whatever the run's seed.

    `limit`: at most so many held-out documents, those with the smallest hashes; all if everything is held out.
    """
    if side is Side.all or eval_fraction == 0:
        return np.full(len(digests), side is not Side.held_out)
    if eval_fraction == 1:
        return np.full(len(digests), side is Side.held_out)
    number = hold_out_number(digests)
    chosen = (number < np.uint64(eval_fraction * 2.0**64)) == (side is Side.held_out)
    if limit is not None and chosen.sum() > limit:
        chosen[np.argsort(number, kind="stable")[limit:]] = False
    return chosen


def smallest_fraction(digests: np.ndarray) -> float:
    """The smallest `eval_fraction`, to two digits, that holds out one of these documents."""
    share = float(hold_out_number(digests).min()) / 2.0**64
    unit = 10.0 ** (math.floor(math.log10(share)) - 1)
    return math.ceil(share / unit + 1e-9) * unit


def hold_out_number(digests: np.ndarray) -> np.ndarray:
    """A uint64 for each document, which depends on its content alone: an eval_fraction of f holds out those below
    f x 2**64."""
    return splitmix64(np.asarray(digests, dtype=np.uint64) ^ _HOLD_OUT)


def _count_targets(supervised: np.ndarray, start: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Targets of each segment, int64 [segments]: the supervised tokens after its first."""
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
    counts[length == 1] = 0  # for an empty range reduceat returns the next element
    return counts
