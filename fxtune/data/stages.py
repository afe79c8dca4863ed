"""Stages of a run: how many rows a step takes, and how many tokens a row has.

`train.batch_ramp` lets the batch grow, and `data.length_schedule` lets rows grow. A stage begins at a share of the
run's steps, so the plan must know the number of steps. With train.epochs it is the fewest steps that cover the epochs.

A stage whose rows are n times shorter than the rows of the last stage takes n times more rows in a step. So each step
and each micro-batch has room for the same tokens: memory, the time of the matmuls and the noise of a gradient stay
about the same, and attention becomes cheaper. "Dataset Decomposition" (arXiv 2405.13226) also keeps a step's tokens.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from fxtune.system.terminal.units import counted


class Stage(NamedTuple):
    share: float
    """The share of the run's steps at which the stage begins; 0 for the first stage."""
    rows: int
    """Rows of a step."""
    length: int
    """Tokens of a row."""


class Start(NamedTuple):
    """A stage's first step, its first row, the rows of each of its steps, and the tokens of each of its rows."""

    step: int
    row: int
    rows: int
    length: int


@dataclass(frozen=True)
class StepRows:
    """The rows of each step of a run."""

    starts: tuple[Start, ...]
    """The start of each stage. The last stage has no end."""
    planned: int = field(default=0, compare=False)
    """The number of steps of the run. Stages begin at shares of this number."""

    @staticmethod
    def of(stages: Sequence[Stage], steps: int = 0) -> StepRows:
        """`stages` laid out for `steps` steps."""
        _, rows, length = stages[0]
        starts = [Start(0, 0, rows, length)]
        for share, rows, length in stages[1:]:
            before = starts[-1]
            first = math.ceil(share * steps - 1e-9)  # in floating point 0.07 x 100 is above 7
            if first == before.step:
                starts.pop()
            starts.append(Start(first, before.row + (first - before.step) * before.rows, rows, length))
        return StepRows(tuple(starts), steps)

    @staticmethod
    def holding(rows: int, stages: Sequence[Stage], max_steps: int | None) -> StepRows:
        """`stages` laid out for the fewest steps that take `rows` rows, but for at most `max_steps`. The number of
        steps is approximate if later steps have fewer rows."""
        low, high = 1, -(-rows // min(stage.rows for stage in stages))
        while low < high:
            middle = (low + high) // 2
            if StepRows.of(stages, middle).first_row(middle) >= rows:
                high = middle
            else:
                low = middle + 1
        return StepRows.of(stages, low if max_steps is None else min(low, max_steps))

    @property
    def has_lengths(self) -> bool:
        """Whether rows of two stages differ in length."""
        return any(start.length != self.starts[0].length for start in self.starts)

    def by_length(self) -> StepRows:
        """The same rows, with only the stages that change the length of rows."""
        changes = [start for before, start in pairwise(self.starts) if start.length != before.length]
        return StepRows((self.starts[0], *changes), self.planned)

    def stage(self, step: int) -> int:
        """The index in `starts` of the stage that has step `step`."""
        return bisect_right(self.starts, step, key=lambda start: start.step) - 1

    def stage_of_row(self, row: int) -> int:
        """The index in `starts` of the stage that has row number `row`."""
        return max(bisect_right(self.starts, row, key=lambda start: start.row) - 1, 0)

    def first_row(self, step: int) -> int:
        """The first row of `step`: the number of rows of all steps before it."""
        start = self.starts[self.stage(step)]
        return start.row + (step - start.step) * start.rows

    def length(self, step: int) -> int:
        """Tokens of a row of `step`."""
        return self.starts[self.stage(step)].length

    def steps(self, rows: int) -> int:
        """The number of steps for `rows` rows. The last step may have fewer rows than the others of its stage."""
        start = self.starts[self.stage_of_row(rows - 1)]
        return start.step - (start.row - rows) // start.rows

    def end(self, stage: int) -> int | None:
        """The number of rows up to the end of a stage; None for the last stage, which has no end."""
        return self.starts[stage + 1].row if stage + 1 < len(self.starts) else None

    def tokens(self, row: int) -> int:
        """The number of tokens for which the rows before `row` have room."""
        total = 0
        for stage in range(self.stage_of_row(row) + 1):
            start, end = self.starts[stage], self.end(stage)
            total += ((row if end is None else min(row, end)) - start.row) * start.length
        return total

    def row(self, tokens: float) -> int:
        """The number of rows that have room for `tokens` tokens, rounded."""
        for stage, start in enumerate(self.starts):
            end = self.end(stage)
            if end is None or tokens < (end - start.row) * start.length:
                return start.row + round(tokens / start.length)
            tokens -= (end - start.row) * start.length
        raise AssertionError("the last stage has no end")

    def text(self, stage: int) -> str:
        """Words for a stage: the rows of a step, and the tokens of a row if stages differ in them."""
        start = self.starts[stage]
        return counted(start.rows, f"rows of {start.length:,} tokens" if self.has_lengths else "rows")

    def __str__(self) -> str:
        later = range(1, len(self.starts))
        each = [f"{self.text(stage)} from step {self.starts[stage].step + 1} on" for stage in later]
        return ", ".join([self.text(0), *(text if self.has_lengths else text.replace(" rows", "") for text in each)])


def ramp_refusals(ramp: Sequence[Sequence[Any]], global_batch_size: int) -> list[str]:
    """Faults of train.batch_ramp, each worded as a change to make."""
    name = f"`train.batch_ramp={[list(stage) for stage in ramp]}`"
    if not _are_pairs(ramp):
        return [f"{name} is a list of [share of the steps, rows], as in [[0.5, 16]]"]
    shares, sizes = [stage[0] for stage in ramp], [int(stage[1]) for stage in ramp]
    found = _wrong_shares(name, shares)
    if ramp and shares[0] == 0 and sizes[0] != global_batch_size:
        found.append(f"{name} begins with {sizes[0]} rows: set train.global_batch_size={sizes[0]}, the first batch")
    if any(size < global_batch_size or size % global_batch_size for size in sizes) or sizes != sorted(sizes):
        found.append(f"{name}: batches grow, and are multiples of `train.global_batch_size={global_batch_size}`")
    return found


def length_refusals(schedule: Sequence[Sequence[Any]], sequence_length: int) -> list[str]:
    """Faults of data.length_schedule, each worded as a change to make."""
    name = f"`data.length_schedule={[list(stage) for stage in schedule]}`"
    if not _are_pairs(schedule):
        return [f"{name} is a list of [share of the steps, tokens of a row], as in [[0.0, 8192], [0.5, 65536]]"]
    if not schedule:
        return []
    shares, lengths = [stage[0] for stage in schedule], [int(stage[1]) for stage in schedule]
    found = _wrong_shares(name, shares)
    if shares[0] != 0:
        found.append(f"{name} does not say how long the first rows are: begin with a stage of share 0")
    if lengths[-1] != sequence_length:
        found.append(
            f"{name} ends with rows of {lengths[-1]} tokens: set data.sequence_length={lengths[-1]}, the "
            "length at which long documents are split"
        )
    elif lengths[0] < 2 or lengths != sorted(set(lengths)):
        found.append(f"{name}: rows grow, from 2 tokens on")
    elif odd := [length for length in lengths if sequence_length % length]:
        fits = next(length for length in range(odd[0], 0, -1) if sequence_length % length == 0)
        found.append(
            f"{name}: {odd[0]} does not divide data.sequence_length={sequence_length}, and each step has room for the "
            f"same tokens. Use {fits}, or another divisor"
        )
    return found


def _are_pairs(stages: Sequence[Sequence[Any]]) -> bool:
    """Whether each of `stages` is a pair of a number and a whole number."""
    return not any(
        [type(number) in (int, float) for number in stage] != [True, True] or stage[1] % 1 for stage in stages
    )


def _wrong_shares(name: str, shares: list[float]) -> list[str]:
    if any(not 0 <= share < 1 for share in shares) or shares != sorted(set(shares)):
        return [f"{name}: shares of the steps ascend, from 0 on and below 1"]
    return []


def stages(
    global_batch_size: int, sequence_length: int, ramp: Sequence[Sequence[Any]] = (), schedule: Sequence[Any] = ()
) -> tuple[Stage, ...]:
    """The stages of a run with `ramp` (train.batch_ramp) and `schedule` (data.length_schedule), which must be free of
    the faults that ramp_refusals() and length_refusals() find."""
    batches = [(0.0, global_batch_size), *((float(share), int(rows)) for share, rows in ramp)]
    lengths = [(0.0, sequence_length), *((float(share), int(length)) for share, length in schedule)]
    found = []
    for share in sorted({share for share, _ in (*batches, *lengths)}):
        batch, length = ([value for begin, value in steps if begin <= share][-1] for steps in (batches, lengths))
        found.append(Stage(share, batch * (sequence_length // length), length))
    return tuple(found)
