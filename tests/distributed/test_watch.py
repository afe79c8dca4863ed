"""Which rank the launcher names and which it ends, by the heartbeats of all ranks."""

import re

import pytest

from fxtune.distributed.heartbeat import STEP, Beat
from fxtune.distributed.watch import FIRST_SECONDS, STALL_SECONDS, STEP_SECONDS, Watch, stalled


def test_the_rank_that_all_others_wait_for_is_named():
    waiting, busy = Beat(5, "adding up gradients", True, 100.0), Beat(5, "forward and backward", False, 90.0)
    late = 101.0 + STALL_SECONDS
    assert stalled({0: waiting, 1: busy}, late) == (1, busy)
    assert stalled({0: waiting, 1: busy}, 110.0) is None
    assert stalled({0: waiting, 1: waiting}, late) is None
    assert stalled({0: busy, 1: busy}, late) is None


def test_rank_whose_process_does_not_run_is_ended_and_named_once(capsys):
    """The clock is ahead of the heartbeats, as on a busy machine."""
    watch, found = Watch(), None
    for second in range(int(STALL_SECONDS) + 1):
        assert found is None
        beats = {0: Beat(5, "deciding", True, 0.0, 10, second), 1: Beat(5, STEP, False, 0.0, 11, 3)}
        found = watch.look(beats, 5.0 * second)
    assert found[0] == 1
    assert capsys.readouterr().err.count("all ranks have waited for rank 1") == 0
    assert re.match(r"Rank 1 of this run \(.*, process 11\) has not run for 45 s .* at step 5, forward", found[1])


def test_rank_without_a_first_pulse_has_more_time():
    watch = Watch()
    for second in range(int(FIRST_SECONDS)):
        assert watch.look({0: Beat(process=10, pulse=second), 1: Beat(process=11)}, 1.0) is None
    rank, why = watch.look({0: Beat(process=10, pulse=-1), 1: Beat(process=11)}, 1.0)
    assert rank == 1
    assert "process 11) has not run for 300 s" in why


@pytest.mark.parametrize(("doing", "ends"), [("tokenizing", False), (STEP, True)])
def test_rank_that_runs_and_does_not_move_is_named_and_in_a_step_ended(capsys, doing, ends):
    watch = Watch()
    for pulse, now in enumerate((STALL_SECONDS + 1, STALL_SECONDS + 2, STEP_SECONDS + 1)):
        beats = {0: Beat(5, "deciding", True, 0.0, 10, pulse), 1: Beat(5, doing, False, 0.0, 11, pulse)}
        found = watch.look(beats, now)
    assert bool(found) == ends
    assert capsys.readouterr().err.count("all ranks have waited for rank 1 for 46 s: it is at step 5") == 1
