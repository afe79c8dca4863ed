"""From documents to segments: what one row can hold, and what is worth holding.

A segment is a document, or a piece of one that is longer than `data.sequence_length`. Nothing comes before a segment's
first token, so that token is never a target; a segment in which no target is left teaches nothing and is dropped, and
counted.

Here too is what decides by lot: a document's side of the hold-out, which hangs on its content alone, and the
permutations of the epochs. Both are hashes (SplitMix64: Steele, Lea, Flood 2014, "Fast splittable pseudorandom number
generators") and not numpy's generators, whose streams may change between numpy versions: a run that is resumed years
later sees the same batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from fxtune.data.config import OnLong
from fxtune.errors import DataError

if TYPE_CHECKING:
    from fxtune.data.tokenized.table import TokenTable

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_HOLD_OUT = np.uint64(0x66787475_6E652031)
_BLOCK = 1 << 24
"""Tokens whose supervision is counted at a time, so that a large table is never in memory as a whole."""


class Side(Enum):
    """Which documents of a table: those left for training, those held out for evaluation, or all."""

    train = "train"
    held_out = "held out"
    all = "all"


@dataclass(frozen=True)
class Segments:
    """Equally long int64 arrays, one entry a segment, in the order of the documents."""

    document: np.ndarray
    """Index of the document in its table."""
    start: np.ndarray
    """Where the segment's first token is in the table's `ids`."""
    length: np.ndarray
    """Tokens."""
    supervised: np.ndarray
    """Targets: supervised tokens other than the segment's first."""

    def __len__(self) -> int:
        return len(self.start)


@dataclass(frozen=True)
class Cut:
    """What became of a table's documents."""

    documents: int
    """Documents on this side of the hold-out."""
    other_side: int
    """Documents on the other side."""
    split: int = 0
    """Documents cut into several segments."""
    pieces: int = 0
    """The segments that they became."""
    truncated: int = 0
    """Documents that lost their end."""
    dropped: int = 0
    """Documents left out because they are too long."""
    without_targets: int = 0
    """Segments left out because they have no target."""
    lost_tokens: int = 0
    """Tokens that were truncated or dropped with a long document."""


def cut(
    table: TokenTable, sequence_length: int, on_long: OnLong, eval_fraction: float, side: Side
) -> tuple[Segments, Cut]:
    """The segments of one side of a table, at most `sequence_length` tokens each, every one with a target.

    `eval_fraction`: the share of documents that is held out. Raises DataError with `on_long=error` if there is a long
    document. The result may be empty.
    """
    offsets = np.asarray(table.offsets, dtype=np.int64)
    chosen = np.flatnonzero(_on(side, table.digests, eval_fraction))
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
    every = Segments(document, start, np.minimum(offsets[document + 1] - start, sequence_length), np.zeros(0))
    targets = _targets(table.supervised, every)
    kept = np.flatnonzero(targets)
    counts = {
        OnLong.split: dict(split=int(long.sum()), pieces=int(pieces[long].sum())),
        OnLong.truncate: dict(truncated=int(long.sum()), lost_tokens=lost),
        OnLong.drop: dict(dropped=int(long.sum()), lost_tokens=lost),
        OnLong.error: {},
    }[on_long]
    return (
        Segments(every.document[kept], every.start[kept], every.length[kept], targets[kept]),
        Cut(
            documents=len(chosen),
            other_side=len(offsets) - 1 - len(chosen),
            without_targets=len(targets) - len(kept),
            **counts,
        ),
    )


def permutation(count: int, *key: int) -> np.ndarray:
    """A permutation of `count` things, int64, that depends on `key` alone."""
    state = np.zeros(1, np.uint64)
    for part in key:
        state = _mix(state + np.array([part % (1 << 64)], np.uint64))
    return np.argsort(_mix(state + np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN))


def _mix(state: np.ndarray) -> np.ndarray:
    """SplitMix64's step, a bijection on uint64 [...]."""
    state = state + _GOLDEN
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def _on(side: Side, digests: np.ndarray, eval_fraction: float) -> np.ndarray:
    """Which documents are on `side`, bool [documents]. Equal documents are on one side, whatever the run's seed."""
    if side is Side.all or eval_fraction == 0:
        return np.full(len(digests), side is not Side.held_out)
    lot = _mix(np.asarray(digests, dtype=np.uint64) ^ _HOLD_OUT)
    return (lot < np.uint64(eval_fraction * 2.0**64)) == (side is Side.held_out)


def _targets(supervised: np.ndarray, segments: Segments) -> np.ndarray:
    """Targets of each segment, int64 [segments]: the supervised tokens after its first."""
    counts = np.zeros(len(segments), np.int64)
    ends = segments.start + segments.length
    begin = 0
    while begin < len(segments):
        end = max(int(np.searchsorted(ends, segments.start[begin] + _BLOCK, side="right")), begin + 1)
        base = segments.start[begin]
        tokens = np.append(np.asarray(supervised[base : ends[end - 1]]).view(np.uint8), np.uint8(0))
        bounds = np.stack([segments.start[begin:end] + 1, ends[begin:end]], axis=1).ravel() - base
        counts[begin:end] = np.add.reduceat(tokens, bounds, dtype=np.int64)[::2]
        begin = end
    counts[segments.length == 1] = 0  # reduceat gives an empty range its next element
    return counts
