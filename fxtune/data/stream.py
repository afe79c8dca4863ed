"""The endless stream of rows: epoch after epoch, each put into rows and shuffled by the seed and its number.

An epoch is a set of segments (all of them, or each source's share when sources have weights). Everything here is a pure
function of (tables, settings, epoch): any part of the stream can be had without what comes before it.

Costs: about 40 bytes a segment for the tables and 8 for each epoch that is kept; a fraction of a second to make an
epoch of a million segments.
"""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Optional

import numpy as np

from fxtune.data.packing import assign, pattern
from fxtune.data.segments import Cut, Segments, Side, cut, permutation
from fxtune.data.sources import OnLong
from fxtune.errors import DataError

if TYPE_CHECKING:
    from fxtune.data.table import TokenTable

_VERSION = 1
"""Part of the fingerprint. Raise it when the same settings would give other rows."""
_PASSES, _ORDER, _ROWS = 1, 2, 3
"""What a permutation is for, so that no two are the same."""
_KEPT = 3
"""Epochs in memory: a step can straddle two, and a loader reads ahead."""


@dataclass(frozen=True)
class StreamSettings:
    """All that decides the rows, besides the tables."""

    sequence_length: int
    packing: bool
    on_long: OnLong
    eval_fraction: float
    side: Side
    weights: Optional[tuple[float, ...]]
    """One a table; None: every segment once an epoch."""
    seed: Optional[int]
    """None: no shuffling, as for evaluation; without packing the longest documents come first then."""


@dataclass(frozen=True)
class Epoch:
    """The rows of one epoch, in the order in which steps take them. int64."""

    segments: np.ndarray
    offsets: np.ndarray
    """Row r is made of segments[offsets[r]:offsets[r + 1]]."""

    def __len__(self) -> int:
        return len(self.offsets) - 1


class Stream:
    """The rows. Raises DataError where a table has nothing to learn from, or has a document that is too long."""

    def __init__(self, tables: Sequence[TokenTable], settings: StreamSettings) -> None:
        self.tables = tuple(tables)
        self.settings = settings
        cuts = [cut(table, settings.sequence_length, settings.on_long, settings.eval_fraction, settings.side)
                for table in self.tables]
        self.cuts: list[Cut] = [counts for _, counts in cuts]
        self._check_supply([segments for segments, _ in cuts])
        self.source = np.repeat(np.arange(len(cuts)), [len(segments) for segments, _ in cuts])
        """int64 [segments]: index of the table."""
        self.segments = Segments(*(np.concatenate([getattr(segments, name) for segments, _ in cuts])
                                   for name in ("document", "start", "length", "supervised")))
        """The segments of all tables, one table after the other."""
        self.supply = [int(segments.supervised.sum()) for segments, _ in cuts]
        """Supervised tokens of each table."""
        self._first = np.searchsorted(self.source, np.arange(len(cuts) + 1))
        self._slots: Optional[tuple[np.ndarray, np.ndarray]] = None
        self._cache: dict[int, Epoch] = {}
        self._ends: list[int] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return Stream, (self.tables, self.settings)  # what was derived is derived again: it can be a million rows

    @property
    def fingerprint(self) -> str:
        """Equal for streams with the same rows."""
        settings = {**asdict(self.settings), "side": self.settings.side.value}
        text = json.dumps([_VERSION, [table.fingerprint for table in self.tables], settings])
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def epoch(self, number: int) -> Epoch:
        if number not in self._cache:
            while len(self._cache) >= _KEPT:
                del self._cache[next(iter(self._cache))]
            self._cache[number] = self._build(number)
        return self._cache[number]

    def end(self, epoch: int) -> int:
        """Rows of all epochs up to and including `epoch`."""
        if self.settings.weights is None:
            return (epoch + 1) * len(self.epoch(0))
        while len(self._ends) <= epoch:  # each weighted epoch draws other segments: a few rows more or less
            self._ends.append((self._ends[-1] if self._ends else 0) + len(self.epoch(len(self._ends))))
        return self._ends[epoch]

    def locate(self, row: int) -> tuple[int, int]:
        """The epoch that holds the stream's row `row`, and the row's place in it."""
        if self.settings.weights is None:
            return divmod(row, len(self.epoch(0)))
        while not self._ends or self._ends[-1] <= row:
            self.end(len(self._ends))
        epoch = bisect_right(self._ends, row)
        return epoch, row - (self._ends[epoch - 1] if epoch else 0)

    def rows(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """The stream's rows first..last - 1: their segments, and the offsets [rows + 1] into those."""
        segments, sizes = [], []
        while first < last:
            number, row = self.locate(first)
            epoch = self.epoch(number)
            offsets = epoch.offsets[row:row + last - first + 1]
            segments.append(epoch.segments[offsets[0]:offsets[-1]])
            sizes.append(np.diff(offsets))
            first += len(offsets) - 1
        return np.concatenate(segments), np.concatenate([[0], np.cumsum(np.concatenate(sizes))])

    def _build(self, number: int) -> Epoch:
        seed, weighted = self.settings.seed, self.settings.weights is not None
        chosen = np.concatenate([self._drawn(at, number) for at in range(len(self.tables))]) if weighted else (
            np.arange(len(self.segments)))
        length = self.segments.length[chosen]
        if not self.settings.packing:
            order = (np.argsort(-length, kind="stable") if seed is None else
                     permutation(len(chosen), seed, _ORDER, number))
            return Epoch(chosen[order], np.arange(len(chosen) + 1))
        if weighted or self._slots is None:
            self._slots = pattern(length, self.settings.sequence_length)
        slots, offsets = self._slots
        if seed is None:
            return Epoch(chosen[assign(length, slots)], offsets)
        documents = chosen[assign(length, slots, permutation(len(chosen), seed, _ORDER, number))]
        rows = permutation(len(offsets) - 1, seed, _ROWS, number)
        size = np.diff(offsets)[rows]
        ends = np.cumsum(size)
        within = np.arange(ends[-1]) - np.repeat(ends - size, size)
        return Epoch(documents[np.repeat(offsets[rows], size) + within], np.concatenate([[0], ends]))

    def _drawn(self, source: int, epoch: int) -> np.ndarray:
        """The segments that a weighted source gives to an epoch.

        A source is an endless line of passes, each a fresh permutation of its segments. An epoch takes the next stretch
        of that line, as many supervised tokens long as the source's share of all sources' tokens; a segment belongs to
        the stretch in which it begins. So shares hold over any number of epochs, and no segment comes again before all
        have come.
        """
        assert self.settings.weights is not None
        share = Fraction(self.settings.weights[source]) / sum(map(Fraction, self.settings.weights))
        supply, quota = self.supply[source], share * sum(self.supply)
        begin, end = math.floor(epoch * quota), math.floor((epoch + 1) * quota)
        first, last = self._first[source], self._first[source + 1]
        drawn = []
        for number in range(begin // supply, -(-end // supply)):
            order = first + permutation(last - first, self.settings.seed or 0, _PASSES, source, number)
            targets = self.segments.supervised[order]
            at = np.cumsum(targets) - targets + number * supply
            drawn.append(order[(at >= begin) & (at < end)])
        return np.concatenate(drawn) if drawn else np.zeros(0, np.int64)

    def _check_supply(self, segments: list[Segments]) -> None:
        """Each table must have something to learn from; of tables that share a hold-out, one is enough."""
        empty = [at for at, found in enumerate(segments) if not len(found)]
        if not empty or (self.settings.side is Side.held_out and len(empty) < len(segments)):
            return
        if self.settings.side is Side.held_out and not any(counts.documents for counts in self.cuts):
            raise DataError(f"data.eval_fraction={self.settings.eval_fraction} holds out none of "
                            f"{sum(counts.other_side for counts in self.cuts):,} documents, so there is nothing to evaluate on. "
                            "Raise it, or name held-out data in data.eval_sources.")
        reasons = []
        for at in empty:
            counts = self.cuts[at]
            reasons.append(f"{self.tables[at].name}: nothing to learn from. {counts.documents:,} documents "
                           f"({counts.other_side:,} more on the other side of data.eval_fraction="
                           f"{self.settings.eval_fraction}), {counts.dropped:,} dropped as longer than "
                           f"data.sequence_length={self.settings.sequence_length:,}, {counts.without_targets:,} "
                           "documents or pieces without a supervised token.")
        advice = ("Raise data.eval_fraction or use data.eval_sources." if self.settings.side is Side.held_out else
                  "Remove the source, or give it rows with answers: only what the model shall say is supervised.")
        raise DataError("\n".join([*reasons, advice]))
