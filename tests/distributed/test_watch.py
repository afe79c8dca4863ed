"""Which rank the launcher names and which it ends, by the heartbeats of all ranks."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.harness import wait_for
from support.ranks import free_port
from torch.distributed import TCPStore

from fxtune.distributed.heartbeat import FORWARD_BACKWARD, Beat
from fxtune.distributed.watch import STALL_SECONDS, STEP_SECONDS, Watch, is_stopped, stalled


def test_the_rank_that_all_others_wait_for_is_named():
    waiting, busy = Beat(5, "adding up gradients", True, 100.0), Beat(5, "forward and backward", False, 90.0)
    late = 101.0 + STALL_SECONDS
    assert stalled({0: waiting, 1: busy}, late) == (1, busy)
    assert stalled({0: waiting, 1: busy}, 110.0) is None
    assert stalled({0: waiting, 1: waiting}, late) is None
    assert stalled({0: busy, 1: busy}, late) is None


@pytest.fixture
def process():
    """A process that does nothing."""
    with subprocess.Popen(["sleep", "600"]) as sleeper:
        yield sleeper
        sleeper.kill()


def beats_without_pulse(process, second):
    """Rank 0 waits for rank 1, whose process has no pulse."""
    return {
        0: Beat(5, "deciding", True, 0.0, os.getpid(), second),
        1: Beat(5, FORWARD_BACKWARD, False, 0.0, process.pid, 3),
    }


def test_rank_whose_process_is_stopped_is_ended_and_named_once(process, capsys):
    """The clock is ahead of the heartbeats, as on a busy machine."""
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    watch, found = Watch(), None
    for second in range(int(STALL_SECONDS) + 1):
        assert found is None
        found = watch.look(beats_without_pulse(process, second), 5.0 * second)
    assert found[0] == 1
    assert capsys.readouterr().err.count("all ranks have waited for rank 1") == 0
    assert re.match(
        rf"Rank 1 of this run \(.*, process {process.pid}\) has not run for 45 s .* at step 5, f", found[1]
    )


def test_rank_inside_a_call_that_holds_the_lock_of_python_is_named_and_has_the_time_of_a_step(process, capsys):
    """Its thread cannot count while, for instance, a driver waits for a card."""
    watch = Watch()
    for second in range(int(STEP_SECONDS)):
        assert watch.look(beats_without_pulse(process, second), 1.0 * second) is None
    assert capsys.readouterr().err.count("all ranks have waited for rank 1") == 1
    rank, why = watch.look(beats_without_pulse(process, int(STEP_SECONDS)), STEP_SECONDS)
    assert rank == 1
    assert "has not run for 1800 s" in why


def test_rank_of_another_host_is_never_taken_for_a_stopped_one():
    assert not is_stopped(Beat(process=os.getpid(), host="another"))
    assert not is_stopped(Beat(process=os.getpid()))


@pytest.mark.parametrize(("doing", "ends"), [("tokenizing", False), (FORWARD_BACKWARD, True)])
def test_rank_that_runs_and_does_not_move_is_named_and_in_a_step_ended(capsys, doing, ends):
    watch = Watch()
    for pulse, now in enumerate((STALL_SECONDS + 1, STALL_SECONDS + 2, STEP_SECONDS + 1)):
        beats = {0: Beat(5, "deciding", True, 0.0, 10, pulse), 1: Beat(5, doing, False, 0.0, 11, pulse)}
        found = watch.look(beats, now)
    assert bool(found) == ends
    assert capsys.readouterr().err.count("all ranks have waited for rank 1 for 46 s: it is at step 5") == 1


WATCHED = """
import os, sys
from datetime import timedelta
from fxtune.distributed import failure, watch
from fxtune.distributed.heartbeat import Heartbeat

watch.PULSE_SECONDS = 0.05
failure.PATIENCE = timedelta(seconds=float(sys.argv[1]))
watching = watch.StoreWatch(1, [(os.getpid(), "here")] * 2, Heartbeat(None), 0)
sys.stdin.readline()
watching.stop()
if failure.keeps_connections():  # fxtune.cli.main ends a rank like this
    os._exit(7)
"""


@pytest.mark.parametrize(("patience", "code"), [(60.0, 0), (0.1, 7)], ids=["late", "never"])
def test_rank_whose_watch_waits_for_the_store_ends_with_its_own_code(patience, code):
    """Python would abort it (SIGABRT) at its exit if a thread were then in a call of torch."""
    port = free_port()
    holder = multiprocessing.get_context("fork").Process(target=_hold_store, args=(port,), daemon=True)
    holder.start()
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "1", "WORLD_SIZE": "2"}
    words = [sys.executable, "-c", WATCHED, str(patience)]
    with subprocess.Popen(words, env={**os.environ, **place}, stdin=subprocess.PIPE) as rank:
        try:
            TCPStore("127.0.0.1", port, is_master=False).wait(["beat 0/1"])
            os.kill(holder.pid, signal.SIGSTOP)
            wait_for(lambda: unread(port))  # the next beat waits for its answer
            rank.stdin.write(b"\n")
            rank.stdin.close()
            time.sleep(0.5)  # it waits for its watch
            if code == 0:
                os.kill(holder.pid, signal.SIGCONT)
            assert rank.wait(600) == code
        finally:
            rank.kill()
            holder.kill()
            holder.join()


def unread(port: int) -> bool:
    """Whether a connection to this port has data that the listening process has not read."""
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path("/proc/net", name).read_text().splitlines()[1:]]
    waiting = {local.rpartition(":")[2]: queues for _, local, _, _, queues, *_ in rows if queues[-8:] != "0" * 8}
    return f"{port:04X}" in waiting


def _hold_store(port):
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    signal.pause()
    del store
