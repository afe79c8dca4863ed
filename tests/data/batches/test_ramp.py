"""A growing global batch: rows keep their order, none is lost or repeated, and any step can be the next one."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxtune.data.batches.ramp import StepRows, conflicts, stages

BATCH = 4
ramps = st.lists(
    st.tuples(st.integers(1, 99), st.integers(1, 3)), min_size=1, max_size=3, unique_by=lambda one: one[0]
).map(
    lambda found: tuple(
        (share / 100, BATCH * (1 + sum(more for _, more in sorted(found)[: index + 1])))
        for index, (share, _) in enumerate(sorted(found))
    )
)


@given(ramps, st.integers(1, 500))
def test_steps_follow_one_another_and_grow(ramp, steps):
    layout = StepRows.of(BATCH, ramp, steps)
    firsts = [layout.first_row(step) for step in range(steps + 1)]
    sizes = [after - before for before, after in itertools.pairwise(firsts)]
    for step, size in enumerate(sizes):
        assert size == max([BATCH, *(rows for share, rows in ramp if step >= share * steps - 1e-6)])
    assert layout.steps(firsts[-1]) == steps
    assert layout.steps(firsts[-1] - 1) == steps
    assert layout.steps(firsts[-2] + 1) == steps


@given(ramps, st.integers(1, 2000))
def test_a_run_over_epochs_has_as_few_steps_as_hold_its_rows(ramp, rows):
    layout = StepRows.holding(rows, BATCH, ramp, None)
    steps = layout.steps(rows)
    assert layout.first_row(steps - 1) < rows <= layout.first_row(steps)
    assert StepRows.holding(rows, BATCH, ramp, steps) == layout
    assert StepRows.of(BATCH, ramp, max(steps, 1)) == layout


def test_without_a_ramp_all_steps_are_equal():
    assert StepRows.holding(100, 8, (), None) == StepRows.of(8)
    assert [StepRows.of(8).first_row(step) for step in (0, 1, 7)] == [0, 8, 56]
    assert str(StepRows.of(8)) == "8 rows"


def test_shares_are_those_of_the_steps():
    layout = StepRows.of(8, ((0.5, 16), (0.7, 32)), 10)
    assert layout.starts == ((0, 0, 8), (5, 40, 16), (7, 72, 32))
    assert str(layout) == "8 rows, 16 from step 6 on, 32 from step 8 on"
    assert StepRows.of(8, ((0.0, 8), (0.5, 16)), 10) == StepRows.of(8, ((0.5, 16),), 10)


@pytest.mark.parametrize(
    ("ramp", "message"),
    [
        ([[0.5, "many"]], "is a list of [share of the steps, rows]"),
        ([[0.5]], "is a list of [share of the steps, rows]"),
        ([[0.5, 12.5]], "is a list of [share of the steps, rows]"),
        ([[1.0, 16]], "ascend, from 0 on and below 1"),
        ([[0.5, 16], [0.2, 32]], "ascend, from 0 on and below 1"),
        ([[0.0, 16]], "begins with 16 rows: set train.global_batch_size=16"),
        ([[0.5, 12]], "multiples of `train.global_batch_size=8`"),
        ([[0.3, 32], [0.5, 16]], "batches grow"),
    ],
)
def test_a_ramp_that_is_none_is_refused(ramp, message):
    (found,) = conflicts(ramp, 8)
    assert message in found
    assert not conflicts([[0.0, 8], [0.5, 16]], 8)
    assert stages([[0.5, 16.0]]) == ((0.5, 16),)
