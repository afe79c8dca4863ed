"""W&B refuses, hangs, breaks off and dies, on loopback: training goes on, and W&B has every step once afterwards."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml
from support.servers import Wandb, black_hole, refused, serving

from fxtune.cli.main import main
from fxtune.tracking import tracker as tracking
from fxtune.tracking import wandb_client
from fxtune.tracking.tracker import Tracker, TrackingConfig, WandbConfig, WandbMode

RUN = "abcd1234"


@pytest.fixture(autouse=True)
def nothing_of_this_machine(monkeypatch, tmp_path):
    for name in list(os.environ):
        if name.startswith("WANDB_") or name == "NETRC":
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    (tmp_path / "home").mkdir()


@pytest.fixture
def server(monkeypatch):
    with serving(Wandb()) as made:
        monkeypatch.setenv("WANDB_BASE_URL", made.url)
        yield made


def start(folder, notes, **more):
    config = WandbConfig(mode=WandbMode.online, project="unit", init_timeout=more.pop("init_timeout", 5.0))
    recorded = {
        "run": {"name": "a run"},
        "tracking": {"wandb": {"project": "unit", "entity": None, "group": None, "tags": []}},
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(recorded))
    return Tracker(TrackingConfig(wandb=config), folder, "a run", recorded, note=notes.append, **more)


def steps(server, run=RUN):
    return [row["train/step"] for row in server.history(run)]


def taken(tracker):
    """Wait until W&B has taken the run."""
    deadline = time.monotonic() + 30
    while not tracker._wandb._folder and time.monotonic() < deadline:
        time.sleep(0.02)
    assert tracker._wandb._folder


def command(notes, program):
    """The command that the last note gives, run as it stands."""
    words = shlex.split(notes[-1].split("To upload it: ")[1])
    assert words[:2] == [program, "sync"], notes
    return words


@pytest.mark.parametrize("fault", ["refused", "silent", 500, 401])
def test_a_server_that_does_not_take_the_run_costs_no_time_and_one_command_afterwards(
    tmp_path, server, monkeypatch, fault
):
    server.mode = fault
    if fault == "refused":
        monkeypatch.setenv("WANDB_BASE_URL", refused())
    notes: list[str] = []
    begun = time.monotonic()
    tracker = start(tmp_path / "run", notes, wandb_id=RUN, init_timeout=1.0)
    for step in (1, 2, 3):
        tracker.log(step, {"train/loss": 1.0 / step})
    assert time.monotonic() - begun < 0.5, "starting and logging do not wait"
    tracker.finish()
    assert time.monotonic() - begun < 15
    assert len([note for note in notes if "W&B did not take the run" in note]) == 1, notes
    words = command(notes, "wandb")
    server.mode = "works"
    if fault in ("refused", 401):  # the others leave the same
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        subprocess.run([sys.executable, "-m", *words], check=True, capture_output=True, timeout=60)
        assert steps(server) == [1, 2, 3]
        assert [row["train/loss"] for row in server.history(RUN)] == [1.0, 0.5, pytest.approx(1 / 3)]


@pytest.mark.parametrize("fault", ["silent", "breaks", 401])
def test_a_server_that_is_lost_half_way_has_every_step_once_in_the_end(tmp_path, server, monkeypatch, fault, capsys):
    """Of a silent one W&B's library says in the end that it did not take everything; of the others it says that all is well."""
    monkeypatch.setattr(wandb_client, "UPLOAD_TIMEOUT", 2.0)
    notes: list[str] = []
    with start(tmp_path / "run", notes, wandb_id=RUN) as tracker:
        for step in range(1, 6):
            tracker.log(step, {"train/loss": 1.0})
            tracker.log(step, {"eval/loss": 2.0})
    assert steps(server) == [1, 2, 3, 4, 5]
    tracker = start(tmp_path / "run", notes, resume_step=5)
    taken(tracker)
    server.mode = fault
    for step in range(6, 11):
        tracker.log(step, {"train/loss": 1.0})
    begun = time.monotonic()
    tracker.finish()
    assert time.monotonic() - begun < 12
    assert len([note for note in notes if "did not finish" in note or "stopped working" in note]) == 1, notes
    words = command(notes, "fxtune")
    server.mode = "works"
    for _ in range(2 if fault == 401 else 1):  # a second time there is nothing left to send
        assert main(words[1:]) == 0, capsys.readouterr()
        assert steps(server) == list(range(1, 11))
    assert all(row["eval/loss"] == 2.0 for row in server.history(RUN)[:5])


def test_a_server_that_comes_back_in_time_needs_nothing_more(tmp_path, server):
    notes: list[str] = []
    tracker = start(tmp_path / "run", notes, wandb_id=RUN)
    tracker.log(1, {"train/loss": 1.0})
    taken(tracker)
    server.mode = 500
    tracker.log(2, {"train/loss": 1.0})
    threading.Timer(3.0, setattr, (server, "mode", "works")).start()
    tracker.finish()
    assert steps(server) == [1, 2]
    assert [note for note in notes if not note.startswith("W&B: http")] == []


STRETCH = """
import os, signal, sys, time
from fxtune.tracking.tracker import Tracker, TrackingConfig, WandbConfig, WandbMode
config = TrackingConfig(wandb=WandbConfig(mode=WandbMode.online, project="unit"))
tracker = Tracker(config, sys.argv[1], "a run", {}, note=print)
for step in range(1, 8):
    tracker.log(step, {"train/loss": 1.0})
while not tracker._wandb._queue.empty():
    time.sleep(0.05)
time.sleep(1)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_run_that_is_killed_goes_on_as_the_same_run_of_wandb_without_a_step_twice(tmp_path, server):
    """Killed within step 7, before a checkpoint had kept its W&B id; it goes on from step 4, in the same folder."""
    folder = tmp_path / "run"
    killed = subprocess.run([sys.executable, "-c", STRETCH, str(folder)], capture_output=True, text=True, timeout=60)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    deadline = time.monotonic() + 20
    while not server.ends and time.monotonic() < deadline:
        time.sleep(0.05)
    [run] = server.rows
    assert server.ends == [1], "W&B shows it as failed"
    assert steps(server, run) == [1, 2, 3, 4, 5, 6], "step 7 may not have been whole"
    notes: list[str] = []
    tracker = start(folder, notes, resume_step=4)
    assert tracker.wandb_id == run
    for step in range(5, 10):
        tracker.log(step, {"train/loss": 1.0})
    tracker.finish()
    assert steps(server, run) == list(range(1, 10))
    assert [json.loads(line)["train/step"] for line in (folder / "metrics.jsonl").open()] == list(range(1, 10))


def test_a_run_that_goes_on_online_sends_what_it_could_not_before(tmp_path, server, monkeypatch):
    monkeypatch.setenv("WANDB_BASE_URL", refused())
    notes: list[str] = []
    with start(tmp_path / "run", notes, wandb_id=RUN, init_timeout=1.0) as tracker:
        for step in (1, 2, 3):
            tracker.log(step, {"train/loss": 1.0})
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    with start(tmp_path / "run", notes, resume_step=2) as tracker:
        for step in (3, 4):
            tracker.log(step, {"train/loss": 1.0})
    assert steps(server) == [1, 2, 3, 4]


def test_a_run_that_was_told_to_stop_does_not_wait_for_a_server_that_is_gone(tmp_path, server):
    notes: list[str] = []
    tracker = start(tmp_path / "run", notes, wandb_id=RUN)
    tracker.log(1, {"train/loss": 1.0})
    taken(tracker)
    server.mode = "silent"
    tracker.log(2, {"train/loss": 1.0})
    begun = time.monotonic()
    tracker.finish(exit_code=75)
    assert time.monotonic() - begun < 4


def test_sync_says_what_is_in_its_way(tmp_path, monkeypatch, capsys):
    assert main(["sync", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err
    notes: list[str] = []
    monkeypatch.setenv("WANDB_BASE_URL", refused())
    with start(tmp_path / "run", notes, init_timeout=1.0) as tracker:
        tracker.log(1, {"train/loss": 1.0})
    monkeypatch.setattr(tracking, "SYNC_PATIENCE", 1.0)
    assert main(["sync", str(tmp_path / "run")]) == 6
    assert "W&B did not take the run" in capsys.readouterr().err
    monkeypatch.delenv("WANDB_API_KEY")
    assert main(["sync", str(tmp_path / "run")]) == 2
    assert "WANDB_API_KEY" in capsys.readouterr().err


def test_a_whole_run_behind_two_black_holes(tmp_path):
    """Neither the hub nor W&B ever answers: what is on this disk is trained on, and the hub is not even asked."""
    with black_hole() as (hub, asked), black_hole() as (wandb, _):
        environment = {
            **os.environ,
            "HF_ENDPOINT": hub,
            "HF_HUB_OFFLINE": "0",
            "WANDB_BASE_URL": wandb,
            "OMP_NUM_THREADS": "1",
        }
        words = [
            "+recipe=quickstart",
            "debug=smoke",
            "train.eval_every=0",
            "tracking.wandb.mode=online",
            "tracking.wandb.init_timeout=1",
            f"run.dir={tmp_path / 'run'}",
            "run.device=cpu",
        ]
        done = subprocess.run(
            [sys.executable, "-m", "fxtune", *words],
            env=environment,
            capture_output=True,
            text=True,
            timeout=200,
            cwd=tmp_path,
        )
    assert done.returncode == 0, done.stderr
    assert asked == []
    assert "W&B did not take the run" in done.stdout
    folder = Path(shlex.split(done.stdout.split("To upload it: wandb sync ")[-1])[0])
    assert folder.is_dir()
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert {json.loads(line)["train/step"] for line in lines} == {1, 2}
