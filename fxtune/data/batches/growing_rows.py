"""The endless sequence of rows of a run whose rows grow in stages (data.length_schedule, stages.py).

An epoch takes each of its segments once. If it lasts over several stages, each stage draws documents at random that no
earlier stage of the epoch has taken:

- A stage that ends within the epoch fills its steps exactly. Documents that fit a row whole come before others. Longer
  documents wait for the next stage.
- If too few documents fit, just enough longer documents are cut to fill the steps.
- If the rest of the epoch fits into the present stage, its long documents are cut, because no longer rows follow.

A piece begins with the last token of the piece before it, as context. So each supervised token of an epoch is a target
exactly once. Chats and groups are never cut, and other documents are cut only with data.on_long=split. A run is
refused if a document must not be cut and no stage of its epoch takes it whole.

All this is a function of (stream, stages, epoch). Epochs that begin in the last stage have the rows of a run without
stages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

import numpy as np

from fxtune.data.batches.epochs import Epoch, EpochStream, RowSequence
from fxtune.data.batches.packing import assign_documents, packing_pattern
from fxtune.data.batches.segments import Segments, cut, permutation, places_within
from fxtune.data.config import OnLong
from fxtune.data.stages import StepRows
from fxtune.errors import DataError

_ORDER, _ROWS = 5, 6
"""Keys of permutations for different purposes. epochs.py has other keys."""


@dataclass(frozen=True)
class CutSegments:
    """The segments of a stream, followed by the pieces of segments that are longer than rows of some stage."""

    segments: Segments
    source: np.ndarray
    """int64 [segments and pieces]: the index of the table of each segment and piece."""
    is_cut: np.ndarray
    """bool [segments]: whether a segment may be cut."""
    first: dict[int, np.ndarray]
    """{length of rows: int64 [segments + 1]}. For rows of length n, segment i has the pieces from first[n][i] up to
    first[n][i + 1] - 1."""

    @staticmethod
    def of(stream: EpochStream, lengths: Sequence[int]) -> CutSegments:
        """The segments of `stream`, with their pieces for rows of each of `lengths`."""
        base = stream.segments
        splits = stream.settings.on_long is OnLong.split
        by_table = np.array(
            [splits and not (table.format.is_chat or table.format.is_group) for table in stream.tables]
        )
        parts, sources, first, count = [base], [stream.source], {}, len(base)
        is_cut = by_table[stream.source]
        for length in lengths:
            pieces = np.zeros(len(base), np.int64)
            for at, table in enumerate(stream.tables):
                long = np.flatnonzero(is_cut & (stream.source == at) & (base.length > length))
                part, pieces[long] = cut(table, base.take(long), length)
                parts.append(part)
                sources.append(np.full(len(part), at))
            # Pieces lie table by table, as segments do.
            first[length] = count + np.concatenate([[0], np.cumsum(pieces)])
            count += int(pieces.sum())
        return CutSegments(Segments.joined(parts), np.concatenate(sources), is_cut, first)

    def pieces(self, segments: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """(the pieces of `segments` for rows of `length`, the number of pieces of each segment), int64."""
        first, end = self.first[length][segments], self.first[length][segments + 1]
        count = end - first
        return np.repeat(first, count) + places_within(count), count


class _Block(NamedTuple):
    """The rows of one stage in an epoch, and the segments that are left for later stages."""

    rows: Epoch
    left: np.ndarray


class GrowingRows(RowSequence):
    """The rows of `stream` in the stages of `step_rows`.

    Counting or building an epoch raises DataError if a document must not be cut and no stage takes it whole.
    """

    has_equal_epochs = False

    def __init__(self, stream: EpochStream, step_rows: StepRows, cut_segments: CutSegments) -> None:
        super().__init__()
        self.stream, self.step_rows, self._cut = stream, step_rows, cut_segments
        self._lengths = step_rows.by_length()
        self.tables, self.shared = stream.tables, stream.shared
        self.segments, self.source = cut_segments.segments, cut_segments.source
        self._whole: dict[int, int] = {}
        """{stage: the number of rows of an epoch inside the stage}, for stages whose epochs all have this number."""

    def share(self, epoch: int, row: int) -> float:
        begin, end = (self.step_rows.tokens(self.end(number)) for number in (epoch - 1, epoch))
        return (self.step_rows.tokens(self.end(epoch - 1) + row) - begin) / (end - begin)

    def row_at(self, epoch: int, share: float) -> int:
        begin, end = (self.step_rows.tokens(self.end(number)) for number in (epoch - 1, epoch))
        return self.step_rows.row(begin + share * (end - begin)) - self.end(epoch - 1)

    def cut_documents(self, epoch: int) -> int:
        """The number of documents of an epoch that are cut for shorter rows."""
        used = self.epoch(epoch).segments
        pieces = used[used >= len(self.stream.segments)]
        return len(set(zip(self.source[pieces].tolist(), self.segments.group[pieces].tolist(), strict=True)))

    def _count(self, number: int) -> int:
        first = self.end(number - 1)
        stage = self._lengths.stage_of_row(first)
        end = self._lengths.end(stage)
        if stage in self._whole and (end is None or first + self._whole[stage] <= end):
            return self._whole[stage]
        count = len(self.epoch(number))
        if self.stream.has_equal_epochs and (end is None or first + count <= end):
            self._whole[stage] = count
        return count

    def _build(self, number: int) -> Epoch:
        row = self.end(number - 1)
        stage = self._lengths.stage_of_row(row)
        if self._lengths.end(stage) is None:
            return self.stream.epoch(number)
        left, blocks = self.stream.drawn(number), []
        while len(left):
            block, left = self._take(left, number, stage, row)
            blocks.append(block)
            row, stage = row + len(block), stage + 1
        ends = np.cumsum([len(block.segments) for block in blocks])
        offsets = [block.offsets[1:] + end - len(block.segments) for block, end in zip(blocks, ends, strict=True)]
        return Epoch(np.concatenate([block.segments for block in blocks]), np.concatenate([[0], *offsets]))

    def _take(self, left: np.ndarray, number: int, stage: int, row: int) -> _Block:
        """Make the rows of a stage from `left`, the segments that are left of epoch `number`. They are the run's rows
        from row `row` on."""
        length, end = self._lengths.starts[stage].length, self._lengths.end(stage)
        left = left[permutation(len(left), self.stream.settings.seed or 0, _ORDER, number, stage)]
        key = (number, stage)
        if end is None:
            return self._rows(left, length, None, key)
        room = end - row
        fits = self.segments.length[left] <= length
        whole, long = left[fits], left[~fits]
        may_cut = self._cut.is_cut[long]
        pieces, counts = self._cut.pieces(long[may_cut], length)
        if may_cut.all() and self._fills(whole) + self._fills(pieces) <= self._capacity(room, length):
            block = self._rows(np.concatenate([whole, pieces]), length, None, key)
            if len(block.rows) <= room:
                return block
        chosen, spare = self._until_full(whole, self._capacity(room, length))
        block = self._rows(chosen, length, room, key)
        if len(block.rows) == room:
            return _Block(block.rows, np.concatenate([block.left, spare, long]))
        # If a document is cut, all its pieces are taken. So the epoch has each document whole or in all its pieces.
        missing = self._capacity(room, length) - self._fills(whole)
        of_segment = np.repeat(np.arange(len(counts)), counts)
        taken, _ = self._until_full(pieces, missing)
        segments = int(of_segment[len(taken) - 1]) + 1 if len(taken) else 0
        block = self._rows(np.concatenate([whole, pieces[of_segment < segments]]), length, room, key)
        if len(block.rows) < room:
            self._refuse(long[~may_cut], stage, row + len(block.rows))
        waiting = np.concatenate([long[may_cut][segments:], long[~may_cut]])
        return _Block(block.rows, np.concatenate([block.left, waiting]))

    def _rows(self, segments: np.ndarray, length: int, room: int | None, key: tuple[int, int]) -> _Block:
        """Put `segments`, which are in random order, into rows of `length` in random order. If they need more than
        `room` rows, keep the fullest rows; without packing the first."""
        if self.stream.settings.packing:
            size = self.segments.length[segments]
            slots, offsets = packing_pattern(size, length)
            segments = segments[assign_documents(size, slots)]
        else:
            offsets = np.arange(len(segments) + 1)
        packed = Epoch(segments, offsets)
        order = permutation(len(packed), self.stream.settings.seed or 0, _ROWS, *key)
        if room is None or len(packed) <= room:
            return _Block(packed.reordered(order) if len(order) else packed, segments[:0])
        fill = np.add.reduceat(self.segments.length[segments], offsets[:-1])
        is_kept = np.zeros(len(packed), bool)
        is_kept[np.argsort(-fill, kind="stable")[:room] if self.stream.settings.packing else slice(room)] = True
        left = packed.reordered(np.flatnonzero(~is_kept)).segments
        return _Block(packed.reordered(order[is_kept[order]]), left)

    def _until_full(self, segments: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
        """(the first `segments`, up to the segment that fills `capacity`; the other segments)."""
        filled = (
            np.cumsum(self.segments.length[segments]) if self.stream.settings.packing else np.arange(len(segments)) + 1
        )
        count = int(np.searchsorted(filled, capacity)) + 1 if capacity > 0 else 0
        return segments[:count], segments[count:]

    def _capacity(self, rows: int, length: int) -> int:
        """The capacity of `rows` rows: tokens with packing, documents without packing."""
        return rows * length if self.stream.settings.packing else rows

    def _fills(self, segments: np.ndarray) -> int:
        """How much of a capacity `segments` take: tokens with packing, documents without packing."""
        return int(self.segments.length[segments].sum()) if self.stream.settings.packing else len(segments)

    def _refuse(self, waiting: np.ndarray, stage: int, row: int) -> NoReturn:
        """Raise DataError: row number `row` would be empty, and the documents that are left are too long for it and
        must not be cut (`waiting`)."""
        waiting = np.unique(waiting)
        source, group = self.source[waiting], self.segments.group[waiting]
        table = self.stream.tables[int(source[0])]
        starts, step = self._lengths.starts, self.step_rows.steps(row + 1) - 1
        share = math.floor(step / max(self.step_rows.planned, 1) * 100) / 100
        on_long = self.stream.settings.on_long
        why = "chats and groups are not cut" if on_long is OnLong.split else f"data.on_long={on_long.value} cuts none"
        longest = int(self.segments.length[waiting].max())
        raise DataError(
            f"data.length_schedule: the documents that fit rows of {starts[stage].length:,} tokens are used up after "
            f"step {step:,} of {self.step_rows.planned:,}, and this stage ends after step {starts[stage + 1].step:,}. "
            f"{len(waiting):,} documents are longer (the first is document {int(group[0]) + 1} of "
            f"{table.name}, the longest has {longest:,} tokens), and {why}. Begin longer rows at share {share:g} or "
            f"earlier, make the rows of this stage longer, or set data.length_schedule=[]."
        )
