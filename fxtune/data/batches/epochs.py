"""The endless stream of rows: epoch after epoch, each put into rows and shuffled by the seed and its number.

An epoch is a set of segments (all of them, or each source's share when sources have weights, or each kind's when long and
short documents are mixed). Everything here is a pure function of (tables, settings, epoch): any part of the stream can be had
without what comes before it.

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

from fxtune.data.batches.length_mix import LengthMix, balanced_order
from fxtune.data.batches.packing import assign, pattern
from fxtune.data.batches.segments import Cut, Segments, Side, cut, permutation
from fxtune.data.config import OnLong
from fxtune.errors import DataError

if TYPE_CHECKING:
    from fxtune.data.tokenized.table import TokenTable

_VERSION = 1
"""Part of the fingerprint. Raise it when the same settings would give other rows."""
_PASSES, _ORDER, _ROWS, _KINDS = 1, 2, 3, 4
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
    mix: Optional[LengthMix] = None
    """The share of long documents' tokens, for training without weights; None: what the segments have."""


@dataclass(frozen=True)
class Epoch:
    """The rows of one epoch, in the order in which steps take them. int64."""

    segments: np.ndarray
    offsets: np.ndarray
    """Row r is made of segments[offsets[r]:offsets[r + 1]]."""

    def __len__(self) -> int:
        return len(self.offsets) - 1


class EpochStream:
    """The rows. Raises DataError where a table has nothing to learn from, or has a document that is too long."""

    def __init__(self, tables: Sequence[TokenTable], settings: StreamSettings) -> None:
        self.tables = tuple(tables)
        self.settings = settings
        cuts = [
            cut(table, settings.sequence_length, settings.on_long, settings.eval_fraction, settings.side)
            for table in self.tables
        ]
        self.cuts: list[Cut] = [counts for _, counts in cuts]
        self._check_supply([segments for segments, _ in cuts])
        self.source = np.repeat(np.arange(len(cuts)), [len(segments) for segments, _ in cuts])
        """int64 [segments]: index of the table."""
        self.segments = Segments(
            *(
                np.concatenate([getattr(segments, name) for segments, _ in cuts])
                for name in ("document", "start", "length", "supervised")
            )
        )
        """The segments of all tables, one table after the other."""
        self.supply = [int(segments.supervised.sum()) for segments, _ in cuts]
        """Supervised tokens of each table."""
        self.long = self.segments.length > (settings.mix.threshold if settings.mix else settings.sequence_length)
        """bool [segments]: which are long, in the sense of `settings.mix`; none without it."""
        if settings.mix:
            self._check_kinds(settings.mix)
        self._drawn = settings.weights is not None or settings.mix is not None
        self._slots: Optional[tuple[np.ndarray, np.ndarray]] = None
        self._cache: dict[int, Epoch] = {}
        self._ends: list[int] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return EpochStream, (self.tables, self.settings)  # what was derived is derived again: it can be a million rows

    @property
    def fingerprint(self) -> str:
        """Equal for streams with the same rows."""
        settings = {**asdict(self.settings), "side": self.settings.side.value}
        if self.settings.mix is None:
            del settings["mix"]  # streams without it have the fingerprint that they had before there was one
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
        if not self._drawn:
            return (epoch + 1) * len(self.epoch(0))
        while len(self._ends) <= epoch:  # each epoch draws other segments: a few rows more or less
            self._ends.append((self._ends[-1] if self._ends else 0) + len(self.epoch(len(self._ends))))
        return self._ends[epoch]

    def locate(self, row: int) -> tuple[int, int]:
        """The epoch that holds the stream's row `row`, and the row's place in it."""
        if not self._drawn:
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
            offsets = epoch.offsets[row : row + last - first + 1]
            segments.append(epoch.segments[offsets[0] : offsets[-1]])
            sizes.append(np.diff(offsets))
            first += len(offsets) - 1
        return np.concatenate(segments), np.concatenate([[0], np.cumsum(np.concatenate(sizes))])

    def tokens(self, epoch: Epoch) -> tuple[np.ndarray, np.ndarray]:
        """Each row's tokens in long segments, and in all: int64 [rows]."""
        length = self.segments.length[epoch.segments]
        sums = [
            np.concatenate([[0], np.cumsum(part)]) for part in (np.where(self.long[epoch.segments], length, 0), length)
        ]
        long, every = (np.diff(part[epoch.offsets]) for part in sums)
        return long, every

    def _build(self, number: int) -> Epoch:
        seed = self.settings.seed
        chosen = np.concatenate(self._stretches(number)) if self._drawn else np.arange(len(self.segments))
        length = self.segments.length[chosen]
        if not self.settings.packing:
            order = (
                np.argsort(-length, kind="stable") if seed is None else permutation(len(chosen), seed, _ORDER, number)
            )
            if self.settings.mix:
                order = balanced_order(np.where(self.long[chosen], length, 0), length, order)
            return Epoch(chosen[order], np.arange(len(chosen) + 1))
        if self._drawn or self._slots is None:
            self._slots = pattern(length, self.settings.sequence_length)
        slots, offsets = self._slots
        if seed is None:
            return Epoch(chosen[assign(length, slots)], offsets)
        documents = chosen[assign(length, slots, permutation(len(chosen), seed, _ORDER, number))]
        rows = permutation(len(offsets) - 1, seed, _ROWS, number)
        if self.settings.mix:
            rows = balanced_order(*self.tokens(Epoch(documents, offsets)), rows)
        size = np.diff(offsets)[rows]
        ends = np.cumsum(size)
        within = np.arange(ends[-1]) - np.repeat(ends - size, size)
        return Epoch(documents[np.repeat(offsets[rows], size) + within], np.concatenate([[0], ends]))

    def _stretches(self, epoch: int) -> list[np.ndarray]:
        """The segments of an epoch that are drawn by shares: of supervised tokens by source, or of tokens by kind."""
        weights, mix = self.settings.weights, self.settings.mix
        if mix:
            share = Fraction(mix.long_share)
            total = int(self.segments.length.sum())
            return [
                self._stretch(
                    np.flatnonzero(self.long == kind), self.segments.length, part * total, epoch, _KINDS, int(kind)
                )
                for kind, part in ((True, share), (False, 1 - share))
            ]
        assert weights is not None
        every = sum(map(Fraction, weights))
        return [
            self._stretch(
                np.flatnonzero(self.source == at),
                self.segments.supervised,
                Fraction(weight) / every * sum(self.supply),
                epoch,
                _PASSES,
                at,
            )
            for at, weight in enumerate(weights)
        ]

    def _stretch(self, members: np.ndarray, sizes: np.ndarray, quota: Fraction, epoch: int, *key: int) -> np.ndarray:
        """What `members` (segments) give to an epoch, as much as makes up `quota`, measured by `sizes` (of all segments).

        They are an endless line of passes, each a fresh permutation of them by `key`. An epoch takes the next stretch of that
        line, `quota` long; a segment belongs to the stretch in which it begins. So shares hold over any number of epochs, and
        no segment comes again before all have come.
        """
        supply = int(sizes[members].sum())
        begin, end = math.floor(epoch * quota), math.floor((epoch + 1) * quota)
        drawn = []
        for number in range(begin // supply, -(-end // supply)):
            order = members[permutation(len(members), self.settings.seed or 0, *key, number)]
            size = sizes[order]
            at = np.cumsum(size) - size + number * supply
            drawn.append(order[(at >= begin) & (at < end)])
        return np.concatenate(drawn) if drawn else np.zeros(0, np.int64)

    def _check_kinds(self, mix: LengthMix) -> None:
        """Both kinds must be there: no share can be drawn from nothing."""
        longest = int(self.segments.length.max())
        if not self.long.any():
            raise DataError(
                f"data.mix.threshold={mix.threshold:,}: no document is longer (the longest has {longest:,} tokens "
                f"after the cut to data.sequence_length={self.settings.sequence_length:,}), so none can make up "
                f"data.mix.long_share={mix.long_share}. Lower the threshold, add long documents, or set "
                "data.mix.long_share=null."
            )
        if self.long.all():
            raise DataError(
                f"data.mix.threshold={mix.threshold:,}: every document is longer, so there is nothing short to mix "
                f"in beside data.mix.long_share={mix.long_share}. Raise the threshold, add short documents, or set "
                "data.mix.long_share=null."
            )

    def _check_supply(self, segments: list[Segments]) -> None:
        """Each table must have something to learn from; of tables that share a hold-out, one is enough."""
        empty = [at for at, found in enumerate(segments) if not len(found)]
        if not empty or (self.settings.side is Side.held_out and len(empty) < len(segments)):
            return
        if self.settings.side is Side.held_out and not any(counts.documents for counts in self.cuts):
            raise DataError(
                f"data.eval_fraction={self.settings.eval_fraction} holds out none of "
                f"{sum(counts.other_side for counts in self.cuts):,} documents, so there is nothing to evaluate on. "
                "Raise it, or name held-out data in data.eval_sources."
            )
        reasons = []
        for at in empty:
            counts = self.cuts[at]
            reasons.append(
                f"{self.tables[at].name}: nothing to learn from. {counts.documents:,} documents "
                f"({counts.other_side:,} more on the other side of data.eval_fraction="
                f"{self.settings.eval_fraction}), {counts.dropped:,} dropped as longer than "
                f"data.sequence_length={self.settings.sequence_length:,}, {counts.without_targets:,} "
                "documents or pieces without a supervised token."
            )
        advice = (
            "Raise data.eval_fraction or use data.eval_sources."
            if self.settings.side is Side.held_out
            else "Remove the source, or give it rows with answers: only what the model shall say is supervised."
        )
        raise DataError("\n".join([*reasons, advice]))
