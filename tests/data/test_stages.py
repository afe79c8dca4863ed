"""Stages of a run: each has the rows of its steps, and any step can be the next one."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxtune.data.stages import Stage, StepRows, length_refusals, ramp_refusals, stages

BATCH = 4
ramps = st.lists(
    st.tuples(st.integers(1, 99), st.integers(1, 3)), min_size=1, max_size=3, unique_by=lambda one: one[0]
).map(
    lambda found: tuple(
        (share / 100, BATCH * (1 + sum(more for _, more in sorted(found)[: index + 1])))
        for index, (share, _) in enumerate(sorted(found))
    )
)
lengths = st.sampled_from([[], [[0.0, 16], [0.4, 64]], [[0.0, 8], [0.25, 32], [0.5, 64]]])


@given(ramps, st.integers(1, 500))
def test_steps_follow_one_another_and_grow(ramp, steps):
    layout = StepRows.of(stages(BATCH, 64, ramp), steps)
    firsts = [layout.first_row(step) for step in range(steps + 1)]
    sizes = [after - before for before, after in itertools.pairwise(firsts)]
    for step, size in enumerate(sizes):
        assert size == max([BATCH, *(rows for share, rows in ramp if step >= share * steps - 1e-6)])
    assert layout.steps(firsts[-1]) == steps
    assert layout.steps(firsts[-1] - 1) == steps
    assert layout.steps(firsts[-2] + 1) == steps


@given(ramps, st.integers(1, 2000))
def test_a_run_over_epochs_has_as_few_steps_as_hold_its_rows(ramp, rows):
    run = stages(BATCH, 64, ramp)
    layout = StepRows.holding(rows, run, None)
    steps = layout.steps(rows)
    assert layout.first_row(steps - 1) < rows <= layout.first_row(steps)
    assert StepRows.holding(rows, run, steps) == layout
    assert StepRows.of(run, steps) == layout


@given(ramps, lengths, st.integers(1, 500))
def test_each_step_has_room_for_the_tokens_of_its_batch(ramp, schedule, steps):
    layout = StepRows.of(stages(BATCH, 64, ramp, schedule), steps)
    plain = StepRows.of(stages(BATCH, 64, ramp), steps)
    for step in range(steps + 1):
        row = layout.first_row(step)
        assert layout.tokens(row) == plain.tokens(plain.first_row(step))
        assert layout.row(layout.tokens(row)) == row
        assert layout.length(step) == max([size for share, size in schedule if step >= share * steps - 1e-6] or [64])


def test_without_a_ramp_all_steps_are_equal():
    one = [Stage(0.0, 8, 64)]
    assert StepRows.holding(100, one, None) == StepRows.of(one)
    assert [StepRows.of(one).first_row(step) for step in (0, 1, 7)] == [0, 8, 56]
    assert str(StepRows.of(one)) == "8 rows"
    assert str(StepRows.of([one[0]._replace(rows=1)])) == "1 row"


def test_shares_are_those_of_the_steps():
    layout = StepRows.of(stages(8, 64, [[0.5, 16], [0.7, 32]]), 10)
    assert layout.starts == ((0, 0, 8, 64), (5, 40, 16, 64), (7, 72, 32, 64))
    assert str(layout) == "8 rows, 16 from step 6 on, 32 from step 8 on"
    assert StepRows.of(stages(8, 64, [[0.0, 8], [0.5, 16]]), 10) == StepRows.of(stages(8, 64, [[0.5, 16]]), 10)


def test_a_batch_and_rows_that_grow_are_one_list_of_stages():
    run = stages(2, 8192, [[0.5, 4]], [[0.0, 1024], [0.5, 4096], [0.75, 8192]])
    assert run == ((0.0, 16, 1024), (0.5, 8, 4096), (0.75, 4, 8192))
    assert str(StepRows.of(run, 8)) == (
        "16 rows of 1,024 tokens, 8 rows of 4,096 tokens from step 5 on, 4 rows of 8,192 tokens from step 7 on"
    )


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
    (found,) = ramp_refusals(ramp, 8)
    assert message in found
    assert not ramp_refusals([[0.0, 8], [0.5, 16]], 8)
    assert stages(8, 64, [[0.5, 16.0]]) == ((0.0, 8, 64), (0.5, 16, 64))


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ([[0.0, "long"]], "is a list of [share of the steps, tokens of a row]"),
        ([[0.0, 16.5], [0.5, 64]], "is a list of [share of the steps, tokens of a row]"),
        ([[0.2, 16], [0.5, 64]], "begin with a stage of share 0"),
        ([[0.0, 16], [1.0, 64]], "ascend, from 0 on and below 1"),
        ([[0.0, 16], [0.7, 32], [0.5, 64]], "ascend, from 0 on and below 1"),
        ([[0.0, 16], [0.5, 128]], "set data.sequence_length=128"),
        ([[0.0, 32], [0.3, 16], [0.5, 64]], "rows grow"),
        ([[0.0, 1], [0.5, 64]], "rows grow, from 2 tokens on"),
        (
            [[0.0, 24], [0.5, 64]],
            "24 does not divide data.sequence_length=64, and each step has room for the same tokens. Use 16",
        ),
    ],
)
def test_a_length_schedule_that_is_none_is_refused(schedule, message):
    (found,) = length_refusals(schedule, 64)
    assert message in found
    assert not length_refusals([[0.0, 16], [0.3, 32.0], [0.6, 64]], 64)
    assert not length_refusals([], 64)
