"""Divides the rows of a run into steps: how many steps the run has, and to which stage each row belongs."""

from __future__ import annotations

import math
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Optional

import numpy as np

from fxtune.data.batches.epochs import EpochStream, RowSequence
from fxtune.data.batches.growing_rows import CutSegments, GrowingRows
from fxtune.data.stages import Stage, StepRows
from fxtune.errors import ConfigError, DataError


@dataclass(frozen=True)
class BatchSizes:
    """How rows are divided into steps and micro-batches."""

    micro_batch_size: int
    """Rows in a micro-batch of the longest rows. A micro-batch of shorter rows has more rows and the same number of
    tokens."""
    global_batch_size: int
    max_steps: Optional[int] = None
    epochs: Optional[float] = None
    row_lengths: tuple[int, ...] = ()
    pad_id: int = 0
    rank: int = 0
    ranks: int = 1
    """Micro-batches of a step are dealt out to the ranks in turn. This plan is for `rank`."""
    piece: int = 0
    pieces: int = 1
    """Each row is padded to a multiple of `pieces` and cut into `pieces` pieces. This plan has number `piece`."""
    last: Optional[int] = None
    """The plan ends after this step; None: max_steps and epochs decide."""
    dropped: int = 0
    """Steps that were dropped when the run went back to an earlier checkpoint. Step s has the rows of step
    s - dropped, because the rows of dropped steps are taken again."""
    stages: tuple[Stage, ...] = ()
    """Stages of the run; empty: a single stage with global_batch_size rows a step, of the stream's sequence_length."""


@dataclass(frozen=True)
class Layout:
    """The rows of a run, and how they are divided into steps."""

    rows: RowSequence
    step_rows: StepRows
    count: int
    """Rows of the run."""
    fullest: tuple[int, ...]
    """For each stage that the run reaches: the most documents in any row of the stage's first epoch."""
    most_shared: tuple[int, ...]
    """For each stage that the run reaches: the most tokens that documents share in any row of its first epoch."""

    @staticmethod
    def of(rows: RowSequence, step_rows: StepRows, count: int) -> Layout:
        fullest, most_shared = list[int](), list[int]()
        for stage, start in enumerate(step_rows.starts):
            if start.row >= count and stage:  # the run ends before this stage
                break
            epoch, row = rows.locate(start.row)
            end = step_rows.end(stage)
            first = rows.epoch(epoch)
            own = slice(row, None if end is None else row + end - start.row)
            for most, counts in (
                (fullest, rows.document_counts(first.segments)),
                (most_shared, rows.shared_counts(first.segments)),
            ):
                in_row = np.diff(np.concatenate([[0], np.cumsum(counts)])[first.offsets])
                most.append(int(in_row[own].max()))
        return Layout(rows, step_rows, count, tuple(fullest), tuple(most_shared))


def lay_out(stream: EpochStream, sizes: BatchSizes) -> Layout:
    """Lay out the rows of a run. The run ends with max_steps or with epochs, whichever comes first."""
    most, packing = sizes.max_steps, stream.settings.packing
    longest = stream.settings.sequence_length
    stages = sizes.stages or (Stage(0.0, sizes.global_batch_size, longest),)
    stages = tuple(stage._replace(rows=stage.rows // stream.rows_of_group) for stage in stages)
    shorter = sorted({stage.length for stage in stages} - {longest})
    if shorter and stream.rows_of_group > 1:
        raise ConfigError(
            "data.length_schedule: without packing each document of a group takes a row, so groups cannot wait "
            "for longer rows. Set data.packing=true, or data.length_schedule=[]."
        )
    cut_segments = CutSegments.of(stream, shorter) if shorter else None

    def layout(step_rows: StepRows) -> Layout:
        """The layout of the rows of max_steps steps, or of the epochs if these have fewer rows."""
        rows = stream if cut_segments is None else GrowingRows(stream, step_rows, cut_segments)
        count = math.inf if most is None else step_rows.first_row(most)
        if most is None or sizes.epochs is not None:
            count = _count_rows(rows, 1.0 if sizes.epochs is None else sizes.epochs, count)
        return Layout.of(rows, step_rows, int(count))

    if most is not None:
        # If `epochs` is set, max_steps is an upper bound, and there may be too few documents for so many steps.
        with suppress(DataError) if sizes.epochs is not None else nullcontext():
            found = layout(StepRows.of(stages, most))
            if found.step_rows.first_row(most) <= found.count:
                return found
    # Begin with the number of steps for rows of the longest length. Shorter rows may need a few more steps.
    equal = [stage._replace(rows=stage.rows * stage.length // longest) if packing else stage for stage in stages]
    rows = int(_count_rows(stream, 1.0 if sizes.epochs is None else sizes.epochs, math.inf))
    low, high = 0, most
    steps = StepRows.holding(rows, equal, most).planned
    while True:
        found = layout(StepRows.of(stages, steps))
        needed = found.step_rows.steps(found.count)
        if needed == steps:
            return found
        low, high = (steps, high) if needed > steps else (low, steps)
        if high is not None and high - low <= 1:
            return layout(StepRows.of(stages, high))
        steps = needed if high is None or low < needed < high else (low + high) // 2


def _count_rows(rows: RowSequence, epochs: float, limit: float) -> float:
    """Rows of `epochs` epochs, but at most `limit`."""
    count = number = 0
    while number < int(epochs) and count < limit:  # stop at the limit, because a weighted epoch takes time to build
        count, number = rows.end(number), number + 1
    if epochs > int(epochs) and count < limit:
        count += rows.row_at(int(epochs), epochs - int(epochs))
    return min(max(count, 1), limit)
