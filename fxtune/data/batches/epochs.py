"""The endless sequence of rows. Each epoch is packed into rows and shuffled by the seed and the epoch's number.

An epoch has all segments. If sources have weights, it has a share of each source, and with data.mix a share of long
and a share of short documents. Everything is a pure function of (tables, settings, epoch). The sequence takes about 40
bytes of memory a segment, and 8 more for each epoch in the cache.
"""

from __future__ import annotations

import hashlib
import json
import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any, Optional

import numpy as np

from fxtune.data.batches.duplicates import first_copies
from fxtune.data.batches.length_mix import LengthMix, balanced_order
from fxtune.data.batches.packing import assign_documents, packing_pattern
from fxtune.data.batches.segments import (
    SegmentCounts,
    Segments,
    Side,
    Spans,
    document_counts,
    is_on_side,
    make_segments,
    permutation,
    places_within,
    spans,
)
from fxtune.data.batches.shared_prompts import shared_tokens
from fxtune.data.config import OnLong
from fxtune.data.tokenized.table import TokenTable
from fxtune.errors import DataError

_VERSION = 1
"""Part of the fingerprint. Raise it when the same settings give other rows."""
_PASSES, _ORDER, _ROWS, _KINDS = 1, 2, 3, 4  # 5 and 6 are in growing_rows.py
"""Keys of permutations for different purposes, so that no two permutations are the same."""


@dataclass(frozen=True)
class StreamSettings:
    """The settings that decide the rows of given tables. Names and order of the fields are part of the fingerprint."""

    sequence_length: int
    packing: bool
    on_long: OnLong
    eval_fraction: float
    side: Side
    weights: Optional[tuple[float, ...]]
    """A weight for each table; None: an epoch has every segment once."""
    seed: Optional[int]
    """None: rows are not shuffled (evaluation). Without packing, the longest documents then come first."""
    mix: Optional[LengthMix] = None
    """None: long and short documents in the shares that the data has."""
    limit: Optional[int] = None
    """Use at most this many held-out documents of each table; None: all."""
    shares: Optional[tuple[float, ...]] = None
    """The held-out share of each table, if tables differ; None: `eval_fraction` for all tables."""
    distinct: Optional[bool] = None
    """Whether only the first of equal documents is used; None: no."""
    share_prompts: Optional[bool] = None
    """Whether a row has the prompt of a pair once (shared_prompts.py); None: no."""

    def share(self, table: int) -> float:
        return self.eval_fraction if self.shares is None else self.shares[table]


@dataclass(frozen=True)
class Epoch:
    """The rows of one epoch, in the order in which steps take them. int64."""

    segments: np.ndarray
    offsets: np.ndarray
    """Row r has segments[offsets[r]:offsets[r + 1]]."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def reordered(self, rows: np.ndarray) -> Epoch:
        """The rows with the indices `rows`, in this order."""
        size = np.diff(self.offsets)[rows]
        taken = np.repeat(self.offsets[rows], size) + places_within(size)
        return Epoch(self.segments[taken], np.concatenate([[0], np.cumsum(size)]))


class RowSequence(ABC):
    """An endless sequence of rows, epoch after epoch."""

    tables: tuple[TokenTable, ...]
    segments: Segments
    """The segments of all tables. Rows consist of segments."""
    source: np.ndarray
    """int64 [segments]: index of each segment's table."""
    has_equal_epochs: bool
    """Whether all epochs have as many rows as the first."""
    shared: Optional[tuple[np.ndarray, ...]]
    """shared_tokens() of each table; None: rows have whole documents."""

    def __init__(self) -> None:
        # A step can take rows of two epochs, and summaries read epoch 0 at any time.
        self.epoch = lru_cache(maxsize=3)(self._build)
        self._ends: list[int] = []

    @abstractmethod
    def _build(self, number: int) -> Epoch: ...

    def _count(self, number: int) -> int:
        """The number of rows of an epoch. All epochs before it have been counted."""
        return len(self.epoch(number))

    def end(self, epoch: int) -> int:
        """The number of rows of all epochs up to and including `epoch`; 0 for -1."""
        if self.has_equal_epochs:
            return (epoch + 1) * len(self.epoch(0))
        while len(self._ends) <= epoch:
            self._ends.append(self.end(len(self._ends) - 1) + self._count(len(self._ends)))
        return self._ends[epoch] if epoch >= 0 else 0

    def locate(self, row: int) -> tuple[int, int]:
        """(the epoch that has row `row` of the sequence, the row's position in this epoch)."""
        if self.has_equal_epochs:
            return divmod(row, len(self.epoch(0)))
        while not self._ends or self._ends[-1] <= row:
            self.end(len(self._ends))
        epoch = bisect_right(self._ends, row)
        return epoch, row - self.end(epoch - 1)

    def rows(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """(the segments of the rows from `first` to `last` - 1, the offsets of rows in these segments [rows + 1])."""
        segments, sizes = [], []
        while first < last:
            number, row = self.locate(first)
            epoch = self.epoch(number)
            offsets = epoch.offsets[row : row + last - first + 1]
            segments.append(epoch.segments[offsets[0] : offsets[-1]])
            sizes.append(np.diff(offsets))
            first += len(offsets) - 1
        return np.concatenate(segments), np.concatenate([[0], np.cumsum(np.concatenate(sizes))])

    def spans(self, segments: np.ndarray) -> Spans:
        return spans(self.tables, self.source[segments], self.segments.take(segments), self.shared)

    def document_counts(self, segments: np.ndarray) -> np.ndarray:
        """The number of documents of each segment, int64 [segments]."""
        return document_counts(self.tables, self.source[segments], self.segments.group[segments])

    def shared_counts(self, segments: np.ndarray) -> np.ndarray:
        """int64, for each segment: the tokens that its documents share with another document of the group."""
        if self.shared is None:
            return np.zeros(len(segments), np.int64)
        found = self.spans(segments)
        return np.bincount(found.segment, found.shared, len(segments)).astype(np.int64)

    def share(self, epoch: int, row: int) -> float:
        """The share of an epoch that is complete before row `row` of the epoch."""
        return row / len(self.epoch(epoch))

    def row_at(self, epoch: int, share: float) -> int:
        """The number of rows in the share `share` of an epoch, rounded."""
        return round(share * len(self.epoch(epoch)))


class EpochStream(RowSequence):
    """The rows of all epochs. Raises DataError if a table has nothing to learn, or if a document is too long."""

    def __init__(
        self,
        tables: Sequence[TokenTable],
        settings: StreamSettings,
        excluded: Optional[np.ndarray] = None,
        near_copies: Optional[np.ndarray] = None,
    ) -> None:
        super().__init__()
        self.tables = tuple(tables)
        self.settings = settings
        self.excluded = excluded
        """Digests of documents to leave out, because they are held out as well."""
        self.near_copies = near_copies
        """Digests of documents to leave out, because they are similar to another document."""
        self.shared = tuple(map(shared_tokens, self.tables)) if settings.share_prompts and self.is_grouped else None
        length, on_long, packing = settings.sequence_length, settings.on_long, settings.packing
        each = [
            make_segments(table, length, on_long, on_side, excluded, packing, shared)
            for table, on_side, shared in zip(
                self.tables, self.groups(), self.shared or [None] * len(self.tables), strict=True
            )
        ]
        by_table = [segments for segments, _ in each]
        self.counts: list[SegmentCounts] = [counts for _, counts in each]
        self._require_segments(by_table)
        self.source = np.repeat(np.arange(len(each)), [len(segments) for segments in by_table])
        self.segments = Segments.joined(by_table)
        self.supply = [int(segments.supervised.sum()) for segments in by_table]
        """Supervised tokens of each table."""
        self.long = self.segments.length > (settings.mix.threshold if settings.mix else settings.sequence_length)
        """bool [segments]: whether a segment is long for `settings.mix`."""
        self.rows_of_group = self._rows_of_group()
        """The number of rows that a group takes: 1 with packing, otherwise the number of its documents."""
        if settings.mix:
            self._require_both_kinds(settings.mix)
        if settings.weights and 0 in self.supply:
            name = self.tables[self.supply.index(0)].name
            raise DataError(
                f"{name} has no supervised tokens, and the weights of data.sources are shares of "
                "supervised tokens. Remove the weights."
            )
        # With weights or a mix each epoch draws other segments, so the number of rows differs a little.
        self.has_equal_epochs = settings.weights is None and settings.mix is None
        self._pattern: Optional[tuple[np.ndarray, np.ndarray]] = None

    def __reduce__(self) -> tuple[Any, ...]:
        # The other attributes follow from these, and can have millions of entries.
        return EpochStream, (self.tables, self.settings, self.excluded, self.near_copies)

    @property
    def fingerprint(self) -> str:
        """Two streams with the same rows have the same fingerprint."""
        settings = {**asdict(self.settings), "side": self.settings.side.value}
        # Fields that a later version added count only if they are set, so that earlier fingerprints stay valid.
        for added in ("mix", "limit", "shares", "distinct", "share_prompts"):
            if settings[added] is None:
                del settings[added]
        if self.settings.side is not Side.all and any(table.prompts is not None for table in self.tables):
            settings["held_out_by"] = "prompt"
        if self.excluded is not None and len(self.excluded):
            settings["excluded"] = hashlib.sha256(self.excluded.tobytes()).hexdigest()
        if self.near_copies is not None and len(self.near_copies):
            settings["near_copies"] = hashlib.sha256(self.near_copies.tobytes()).hexdigest()
        text = json.dumps([_VERSION, [table.fingerprint for table in self.tables], settings])
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    @cached_property
    def most_documents(self) -> int:
        """The number of documents in the largest group."""
        return max((int(np.diff(table.groups).max()) for table in self.tables if table.is_grouped), default=1)

    @property
    def is_grouped(self) -> bool:
        """Whether some group has several documents, or some document has a label."""
        return any(table.is_grouped for table in self.tables)

    def groups(self) -> list[np.ndarray]:
        """For each table, a mask of the groups that are used, bool. They are on the stream's side, and data.dedup does
        not leave them out."""
        settings, used, seen = self.settings, [], np.zeros(0, np.uint64)
        for at, table in enumerate(table.by_group for table in self.tables):
            chosen = is_on_side(settings.side, table.held_out_by, settings.share(at), settings.limit)
            if settings.distinct:
                chosen &= first_copies(table, seen)
                seen = np.union1d(seen, table.digests[chosen])
            if self.near_copies is not None:
                chosen &= ~np.isin(table.digests, self.near_copies)
            used.append(chosen)
        return used

    def labels(self, found: Optional[Spans] = None) -> np.ndarray:
        """The label of each document of `found`, NaN without one, float32 [documents]. `found`: None for the documents
        of all segments."""
        found = self.spans(np.arange(len(self.segments))) if found is None else found
        labels = np.full(len(found), np.nan, np.float32)
        for at, table in enumerate(self.tables):
            if table.labels is not None:
                own = found.source == at
                labels[own] = table.labels[found.document[own]]
        return labels

    def row_tokens(self, epoch: Epoch) -> tuple[np.ndarray, np.ndarray]:
        """(each row's tokens in long segments, each row's tokens), int64 [rows]."""
        length = self.segments.length[epoch.segments]
        parts = (np.where(self.long[epoch.segments], length, 0), length)
        long, total = (np.diff(np.concatenate([[0], np.cumsum(part)])[epoch.offsets]) for part in parts)
        return long, total

    def _build(self, number: int) -> Epoch:
        seed, mix = self.settings.seed, self.settings.mix
        chosen = self.drawn(number)
        length = self.segments.length[chosen]
        order = None if seed is None else permutation(len(chosen), seed, _ORDER, number)
        if not self.settings.packing:
            if order is None:
                order = np.argsort(-length, kind="stable")
            if mix:
                order = balanced_order(np.where(self.long[chosen], length, 0), length, order)
            return Epoch(chosen[order], np.arange(len(chosen) + 1))
        if self._pattern is None or not self.has_equal_epochs:
            self._pattern = packing_pattern(length, self.settings.sequence_length)
        slots, offsets = self._pattern
        segments = chosen[assign_documents(length, slots, order)]
        if seed is None:
            return Epoch(segments, offsets)
        rows = permutation(len(offsets) - 1, seed, _ROWS, number)
        if mix:
            rows = balanced_order(*self.row_tokens(Epoch(segments, offsets)), rows)
        return Epoch(segments, offsets).reordered(rows)

    def drawn(self, epoch: int) -> np.ndarray:
        """The segments of an epoch before they are shuffled or packed, int64."""
        return np.arange(len(self.segments)) if self.has_equal_epochs else np.concatenate(self._draw(epoch))

    def _draw(self, epoch: int) -> list[np.ndarray]:
        """The segments of an epoch that has weights or a mix: an array for each source, or for long and for short
        documents."""
        weights, mix, of = self.settings.weights, self.settings.mix, self.segments
        if mix:
            share, total = Fraction(mix.long_share), int(of.length.sum())
            return [
                self._draw_share(self.long == is_long, of.length, part * total, epoch, _KINDS, int(is_long))
                for is_long, part in ((True, share), (False, 1 - share))
            ]
        assert weights is not None
        unit = Fraction(sum(self.supply)) / sum(map(Fraction, weights))
        return [
            self._draw_share(self.source == at, of.supervised, Fraction(weight) * unit, epoch, _PASSES, at)
            for at, weight in enumerate(weights)
        ]

    def _draw_share(
        self, members: np.ndarray, sizes: np.ndarray, quota: Fraction, epoch: int, *key: int
    ) -> np.ndarray:
        """Draw segments of `members` (a mask) for an epoch, until their `sizes` add up to `quota`.

        The members form an endless sequence of passes. Each pass is a new permutation by `key`. An epoch goes on where
        the epoch before it ended, so shares hold over any number of epochs, and each pass uses every segment once.
        """
        segments = np.flatnonzero(members)
        supply = int(sizes[segments].sum())
        begin, end = math.floor(epoch * quota), math.floor((epoch + 1) * quota)
        drawn = [np.zeros(0, np.int64)]
        for number in range(begin // supply, -(-end // supply)):
            order = segments[permutation(len(segments), self.settings.seed or 0, *key, number)]
            size = sizes[order]
            at = np.cumsum(size) - size + number * supply
            drawn.append(order[(at >= begin) & (at < end)])
        return np.concatenate(drawn)

    def _rows_of_group(self) -> int:
        """Raises DataError for groups of different sizes without packing."""
        if self.settings.packing or not self.is_grouped:
            return 1
        sizes = np.unique(document_counts(self.tables, self.source, self.segments.group)).tolist()
        if len(sizes) > 1:
            raise DataError(
                f"Groups of {' and '.join(map(str, sizes[:3]))} documents: without packing each document takes a row, "
                "and a micro-batch holds whole groups, so all groups must have the same number of documents. Set "
                "data.packing=true."
            )
        return int(sizes[0])

    def _require_both_kinds(self, mix: LengthMix) -> None:
        if not self.long.any():
            longest = int(self.segments.length.max())
            why = f"no document is longer (the longest has {longest:,} tokens after data.on_long was applied)"
            cure = "Lower the threshold, add long documents"
        elif self.long.all():
            why = "every document is longer, so there are no short ones"
            cure = "Raise the threshold, add short documents"
        else:
            return
        raise DataError(
            f"data.mix.threshold={mix.threshold:,}: {why}; data.mix.long_share={mix.long_share} cannot be reached. "
            f"{cure}, or set data.mix.long_share=null."
        )

    def _require_segments(self, by_table: list[Segments]) -> None:
        """Raise DataError if a table has no segment. For held-out data, one table with segments is enough."""
        held_out = self.settings.side is Side.held_out
        empty = [at for at, segments in enumerate(by_table) if not len(segments)]
        if not empty or (held_out and len(empty) < len(by_table)):
            return
        length = f"data.sequence_length={self.settings.sequence_length:,}"
        lines = []
        for at in empty:
            counts, table = self.counts[at], self.tables[at]
            share = f"data.eval_fraction={self.settings.share(at)}"
            found = [
                f"{count:,} {what}"
                for count, what in (
                    (counts.other_side, f"{'not held out' if held_out else 'held out'} by {share}"),
                    (counts.dropped, f"dropped as longer than {length}"),
                    (counts.truncated, f"cut at {length} (data.on_long=split keeps the rest)"),
                    (counts.without_targets, "without a supervised token"),
                    (counts.overlapping, "held out elsewhere as well"),
                )
                if count
            ]
            prompts = " (all answers to a prompt are on one side)" if table.prompts is not None else ""
            nothing = f"nothing to {'evaluate on' if held_out else 'learn from'}"
            lines.append(f"{table.name}: {nothing}. {table.format.noun}{prompts}: {', '.join(found) or 'none'}.")
        cure = "Raise data.eval_fraction, or name held-out data in data.eval_sources."
        if not held_out:
            cure = "Give the source rows with answers that fit a row, hold out fewer of them, or remove the source."
        raise DataError("\n".join([*lines, cure]))
