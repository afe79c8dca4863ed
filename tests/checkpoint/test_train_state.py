import json
from dataclasses import asdict

import pytest

from fxtune.checkpoint.train_state import TrainState, without_clock


def test_a_state_is_the_same_after_a_file():
    state = TrainState(3, best_loss=1.5, schedule={"last": 9}, rows={"training": 2}, clock={"seconds": 2.5})
    assert TrainState.of(json.loads(json.dumps(asdict(state)))) == state


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"speed": 3}, "state.json has `speed`, which this version of fxtune does not know"),
        ({"step": "3"}, "`step` is not of its type"),
        ({"best_loss": "low"}, "`best_loss` is no number"),
        ({"schedule": {"last": 9.5}}, "`schedule` is not as fxtune writes it"),
        ({"rows": {"training": 0}}, "`rows` are no numbers of rows"),
    ],
)
def test_a_state_that_fxtune_did_not_write_is_refused(values, why):
    with pytest.raises(ValueError, match=why):
        TrainState.of({**asdict(TrainState()), **values})


def test_two_states_differ_in_more_than_the_clock():
    early, late, later = (
        without_clock(json.dumps(asdict(TrainState(step, clock={"seconds": seconds}))))
        for step, seconds in ((1, 2.0), (1, 3.0), (2, 3.0))
    )
    assert early == late != later
