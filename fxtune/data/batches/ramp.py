"""How many rows each step takes: `train.global_batch_size`, or a batch that grows in stages (`train.batch_ramp`).

A stage begins at a share of the run's steps, so the plan must know how many there are. With train.epochs that is the
smallest number whose steps hold all rows; a longer run never holds fewer. The sequence of rows is the same as without
a ramp: stages only cut it into steps elsewhere, so nothing is lost or repeated. Learning-rate schedules count steps,
as always.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Stages = tuple[tuple[float, int], ...]
"""(share of the steps from which on, rows of a step), ascending."""


@dataclass(frozen=True)
class StepRows:
    """The rows of each step, laid out for a number of steps."""

    starts: tuple[tuple[int, int, int], ...]
    """Of each stage its first step, its first row, and the rows of its steps. The last stage has no end."""

    @staticmethod
    def of(batch: int, stages: Stages = (), steps: int = 0) -> StepRows:
        """`batch` rows at first, and `stages` laid out for `steps` steps."""
        starts = [(0, 0, batch)]
        for share, rows in stages:
            before, first_row, size = starts[-1]
            first = math.ceil(share * steps - 1e-9)  # 0.7 x 10 is above 7
            if first == before:
                starts.pop()
            starts.append((first, first_row + (first - before) * size, rows))
        return StepRows(tuple(starts))

    @staticmethod
    def holding(rows: int, batch: int, stages: Stages, max_steps: int | None) -> StepRows:
        """The layout of a run over `rows` rows, of at most `max_steps` steps."""
        if not stages:
            return StepRows.of(batch)
        low, high = 1, -(-rows // batch)
        while low < high:
            middle = (low + high) // 2
            if StepRows.of(batch, stages, middle).first_row(middle) >= rows:
                high = middle
            else:
                low = middle + 1
        return StepRows.of(batch, stages, low if max_steps is None else min(low, max_steps))

    def first_row(self, step: int) -> int:
        """The first row of `step`: the number of rows of all steps before it."""
        first, row, size = self.starts[bisect_right(self.starts, step, key=lambda start: start[0]) - 1]
        return row + (step - first) * size

    def steps(self, rows: int) -> int:
        """How many steps `rows` rows fill; the last one may be short."""
        first, row, size = self.starts[max(bisect_right(self.starts, rows - 1, key=lambda start: start[1]) - 1, 0)]
        return first - (row - rows) // size

    def __str__(self) -> str:
        (_, _, batch), *later = self.starts
        return f"{batch} rows" + "".join(f", {size} from step {first + 1} on" for first, _, size in later)


def conflicts(ramp: Sequence[Sequence[Any]], global_batch_size: int) -> list[str]:
    """What is wrong with train.batch_ramp, worded as what to change."""
    name = f"`train.batch_ramp={[list(stage) for stage in ramp]}`"
    if any([type(one) in (int, float) for one in stage] != [True, True] or stage[1] % 1 for stage in ramp):
        return [f"{name} is a list of [share of the steps, rows], as in [[0.5, 16]]"]
    shares, sizes = [stage[0] for stage in ramp], [int(stage[1]) for stage in ramp]
    found = []
    if any(not 0 <= share < 1 for share in shares) or shares != sorted(set(shares)):
        found.append(f"{name}: shares of the steps ascend, from 0 on and below 1")
    if ramp and shares[0] == 0 and sizes[0] != global_batch_size:
        found.append(f"{name} begins with {sizes[0]} rows: set train.global_batch_size={sizes[0]}, the first batch")
    if any(size < global_batch_size or size % global_batch_size for size in sizes) or sizes != sorted(sizes):
        found.append(f"{name}: batches grow, and are multiples of `train.global_batch_size={global_batch_size}`")
    return found


def stages(ramp: Sequence[Sequence[Any]]) -> Stages:
    """train.batch_ramp, without conflicts, for StepRows."""
    return tuple((float(share), int(rows)) for share, rows in ramp)
