"""How many ranks are started, and the message about one that stalls or dies."""

import json
import os
import re
import signal
import struct
import subprocess
import time
from dataclasses import asdict, dataclass

import pytest
import torch
from support.harness import command, kill, run, start, wait_for
from support.killing import tail
from support.processes import alive, children
from support.ranks import messages

from fxtune.config.root import Config, RunConfig, TrainConfig
from fxtune.distributed import launch
from fxtune.distributed.failure import Failure
from fxtune.distributed.heartbeat import FORWARD_BACKWARD, SAVING, SIZE, Beat
from fxtune.distributed.launch import _conclude, _overdue
from fxtune.distributed.world import Device
from fxtune.errors import ConfigError, DataError, HardwareError, RankError, Stopped, UserError
from fxtune.settle.ranks import ranks_of


def ranks_to_start(gpus: str, cpu: bool, parts: int) -> int:
    run = RunConfig(gpus=gpus, device=Device.cpu if cpu else Device.auto)
    return ranks_of(Config(run=run, train=TrainConfig(micro_batch_size=1, global_batch_size=parts)))


def test_auto_takes_as_many_gpus_as_divide_a_step(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert [ranks_to_start("auto", False, parts) for parts in (1, 2, 3, 4, 6, 8)] == [1, 2, 3, 4, 3, 4]
    assert ranks_to_start("auto", True, 8) == 1
    assert ranks_to_start("2", False, 8) == 2
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert ranks_to_start("auto", False, 8) == 1
    assert ranks_to_start("3", True, 6) == 3


def test_impossible_numbers_of_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(HardwareError, match=r"run\.gpus=3, but torch sees 2 GPUs here"):
        ranks_to_start("3", False, 6)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(HardwareError, match=r"run\.gpus=2, but torch sees no GPU here \(CUDA_VISIBLE_DEVICES=''\)"):
        ranks_to_start("2", False, 4)
    with pytest.raises(ConfigError, match=r"A step has 3 micro-batches .* run\.gpus=2 needs a number that 2"):
        ranks_to_start("2", True, 3)


@dataclass
class Death:
    """torch's record of a rank that ended."""

    exitcode: int
    timestamp: int
    pid: int = 7


def lost(rank):
    return Failure(rank, "lost another rank", 7, lost=True, at=101.5)


def stopped(rank, at=101.5):
    return Failure(rank, "saved after step 3", 75, signal=int(signal.SIGTERM), at=at)


BEATS = {1: Beat(5, "adding up gradients", True)}


@pytest.mark.parametrize("other", [lost(0), stopped(0)])
def test_killed_rank_is_reported_and_not_what_followed(other):
    """torch sends the other ranks a SIGTERM. In start-up that stops them at once, so they end as stopped runs."""
    deaths = {1: Death(-signal.SIGKILL, 101), 0: Death(other.exit_code, 102)}
    with pytest.raises(
        RankError, match=r"Rank 1 of this run \(.*process 7\) was killed by SIGKILL at step 5, adding up"
    ):
        _conclude(deaths, [other], BEATS, "")


def test_error_of_a_rank_is_raised_with_its_exit_code():
    announced = [Failure(1, "no such file", 3, at=100.2), lost(0)]
    with pytest.raises(UserError, match="no such file") as told:
        _conclude({1: Death(3, 100), 0: Death(-signal.SIGTERM, 101)}, announced, {}, "")
    assert isinstance(told.value, DataError)


def test_signal_at_one_rank_and_a_bug_of_one_rank():
    with pytest.raises(Stopped, match="saved after step 3"):
        _conclude({1: Death(75, 101), 0: Death(75, 101)}, [stopped(1, 101.0), stopped(0)], {}, "")
    announced = [Failure(1, "KeyError", 1, bug=True, at=100.2), lost(0)]
    assert _conclude({1: Death(1, 100), 0: Death(7, 101)}, announced, {}, "") == 1
    assert _conclude({1: Death(2, 100), 0: Death(-signal.SIGTERM, 101)}, [], {}, "") == 2


def test_rank_that_the_launcher_ended_is_reported():
    with pytest.raises(RankError, match=r"Rank 1 has not run for 45 s\. The same command goes on"):
        _conclude({1: Death(-signal.SIGKILL, 101)}, [lost(0)], {}, "Rank 1 has not run for 45 s.")


@pytest.fixture
def training(tmp_path):
    """The launcher of a run of two ranks in `tmp_path` that has taken a few steps, and that only the test ends."""
    process = start(command(tmp_path, "train.epochs=10000", "run.gpus=2", "run.device=cpu"), tmp_path)
    metrics = tmp_path / "run" / "metrics.jsonl"
    try:
        wait_for(lambda: metrics.exists() and metrics.read_text().count("train/loss") > 3, process)
        yield process
    finally:
        kill(process)


def the_message(folder):
    """The only message in the output of the runs in `folder`."""
    said = messages(folder)
    assert len(said) == 1, said
    return said[0]


@pytest.mark.vital
def test_command_starts_two_ranks_and_stops_them_together(training, tmp_path):
    training.send_signal(signal.SIGTERM)
    assert training.wait(600) == 75, tail(tmp_path)
    assert "SIGTERM: saved after step" in the_message(tmp_path)


@pytest.mark.slow
def test_killed_rank_is_named_and_nothing_is_left_running(training, tmp_path):
    victims = processes_of(training.pid)
    assert len(victims) == 2
    os.kill(victims[1], signal.SIGKILL)
    assert training.wait(600) == 7, tail(tmp_path)
    assert re.search(r"Rank 1 of this run .* was killed by SIGKILL at step \d+, ", the_message(tmp_path))
    assert not any(map(alive, victims))


def processes_of(launcher: int) -> list[int]:
    return children(launcher, "fxtune")


@pytest.mark.slow
def test_stopped_rank_is_named_and_the_run_ends_within_a_minute(training, tmp_path):
    ranks = processes_of(training.pid)
    os.kill(ranks[1], signal.SIGSTOP)
    assert training.wait(600) == 7, tail(tmp_path)
    message = [line for line in tail(tmp_path, 10**6).splitlines() if line.startswith("fxtune: Rank")]
    assert len(message) == 1
    assert re.search(r"Rank 1 of this run \(.*, process \d+\) has not run for 45 s .* at step \d+, ", message[0])
    assert not any(map(alive, ranks))


@pytest.mark.slow
def test_ranks_save_and_end_when_their_launcher_is_killed(training, tmp_path):
    ranks = processes_of(training.pid)
    assert len(ranks) == 2
    training.kill()
    training.wait()
    wait_for(lambda: not any(map(alive, ranks)))
    logged = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])["train/step"]
    newest = max((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert int(newest.name.removeprefix("step-")) == logged


@pytest.mark.slow
def test_mistake_with_two_ranks_is_one_message(tmp_path):
    done = run([*command(tmp_path, "data.sources=[{path: none.jsonl}]"), "run.gpus=2", "run.device=cpu"], tmp_path)
    assert done.code == 3
    assert done.text.count("fxtune:") == 1
    assert "none.jsonl" in done.text


def test_ranks_that_live_on_after_a_failure_are_overdue():
    """Rank 0 waits in a step for rank 1, whose process does not end; rank 2 writes a checkpoint."""
    beats = {0: Beat(5, FORWARD_BACKWARD), 1: Beat(5, FORWARD_BACKWARD), 2: Beat(5, SAVING)}
    error = Failure(1, "out of memory", 4, at=100.0)
    assert _overdue([error], beats, 101.0) == set()
    assert _overdue([error], beats, 131.0) == {0, 1}
    assert _overdue([stopped(1, 100.0)], beats, 131.0) == {1}
    assert _overdue([Failure(7, "before its first beat", 3, at=100.0)], {}, 131.0) == set()


def test_launcher_kills_a_rank_that_does_not_end_after_its_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "PULSE_SECONDS", 0.02)
    rank = subprocess.Popen(["sleep", "600"])
    beat = json.dumps([5, FORWARD_BACKWARD, False, time.monotonic(), rank.pid]).encode().ljust(SIZE - 8) + struct.pack(
        "q", 3
    )
    (tmp_path / "1").write_bytes(beat)
    failed = Failure(1, "out of memory", 4, at=time.time() - 31)
    (tmp_path / "failure-1").write_text(json.dumps(asdict(failed)))
    try:
        with launch._LauncherWatch(tmp_path) as watch:
            assert rank.wait(600) == -signal.SIGKILL
    finally:
        rank.kill()
        rank.wait()
    with pytest.raises(HardwareError, match="out of memory"):
        _conclude({1: Death(-signal.SIGKILL, int(failed.at) + 31)}, [failed], {}, watch.ended)
