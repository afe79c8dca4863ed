"""How many ranks are started, and what is said of one that stalls or dies."""

import os
import re
import signal
from pathlib import Path

import pytest
import torch
from support.harness import command, kill, run, start, wait_for
from support.killing import tail

from fxtune.distributed.heartbeat import Beat
from fxtune.distributed.launch import STALL_SECONDS, ranks_to_start, stalled
from fxtune.errors import ConfigError, HardwareError


def test_auto_takes_as_many_gpus_as_divide_a_step(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert [ranks_to_start("auto", False, parts) for parts in (1, 2, 3, 4, 6, 8)] == [1, 2, 3, 4, 3, 4]
    assert ranks_to_start("auto", True, 8) == 1
    assert ranks_to_start("2", False, 8) == 2


def test_impossible_numbers_of_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(HardwareError, match=r"run\.gpus=3, but torch sees 2 GPUs here"):
        ranks_to_start("3", False, 6)
    with pytest.raises(ConfigError, match=r"run\.gpus=2 does not divide a step into equal parts: it has 3 micro"):
        ranks_to_start("2", False, 3)


def test_the_rank_that_all_others_wait_for_is_named():
    waiting, busy = Beat(5, "adding up gradients", True, 100.0), Beat(5, "forward and backward", False, 90.0)
    late = 101.0 + STALL_SECONDS
    assert stalled({0: waiting, 1: busy}, late) == (1, busy)
    assert stalled({0: waiting, 1: busy}, 110.0) is None
    assert stalled({0: waiting, 1: waiting}, late) is None
    assert stalled({0: busy, 1: busy}, late) is None


@pytest.fixture
def training(tmp_path):
    """The launcher of a run of two ranks in `tmp_path` that has taken a few steps."""
    process = start([*command(tmp_path, "train.epochs=40"), "run.gpus=2", "run.device=cpu"], tmp_path)
    metrics = tmp_path / "run" / "metrics.jsonl"
    try:
        wait_for(lambda: metrics.exists() and metrics.read_text().count("train/loss") > 3, process)
        yield process
    finally:
        kill(process)


def the_message(folder):
    """The only message in the output of the runs in `folder`."""
    said = [line for line in tail(folder, 10**6).splitlines() if line.startswith("fxtune:")]
    assert len(said) == 1, said
    return said[0]


@pytest.mark.slow
def test_command_starts_two_ranks_and_stops_them_together(training, tmp_path):
    training.send_signal(signal.SIGTERM)
    assert training.wait(600) == 75, tail(tmp_path)
    assert "SIGTERM: saved after step" in the_message(tmp_path)


@pytest.mark.slow
def test_killed_rank_is_named_and_nothing_is_left_running(training, tmp_path):
    ranks = Path(f"/proc/{training.pid}/task/{training.pid}/children").read_text().split()
    victims = [int(rank) for rank in ranks if b"fxtune" in Path(f"/proc/{rank}/cmdline").read_bytes()]
    assert len(victims) == 2
    os.kill(victims[1], signal.SIGKILL)
    assert training.wait(600) == 7, tail(tmp_path)
    assert re.search(r"Rank 1 of this run .* was killed by SIGKILL at step \d+, ", the_message(tmp_path))
    assert not any(Path(f"/proc/{rank}").exists() for rank in victims)


@pytest.mark.slow
def test_mistake_with_two_ranks_is_one_message(tmp_path):
    done = run([*command(tmp_path, "data.sources=[{path: none.jsonl}]"), "run.gpus=2", "run.device=cpu"], tmp_path)
    assert done.code == 3
    assert done.text.count("fxtune:") == 1
    assert "none.jsonl" in done.text
