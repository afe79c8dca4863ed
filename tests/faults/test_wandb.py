"""A W&B server on loopback refuses, hangs, breaks off and dies: training goes on, and W&B has every step once
afterwards.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from threading import Thread

import pytest
import yaml
from support.accounts import hide_accounts
from support.harness import wait_for
from support.servers import Wandb, black_hole, refused, serving

from fxtune.cli.main import main
from fxtune.tracking import client
from fxtune.tracking import tracker as tracking
from fxtune.tracking.tracker import Tracker, TrackingConfig, WandbConfig, WandbMode

RUN = "abcd1234"


@pytest.fixture(autouse=True)
def no_credentials(monkeypatch, tmp_path):
    hide_accounts(monkeypatch, tmp_path)
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Long timeouts for a working W&B on a busy machine."""
    monkeypatch.setattr(tracking, "SYNC_PATIENCE", 300.0)
    for name in ("END_TIMEOUT", "UPLOAD_TIMEOUT", "START_TIMEOUT", "SERVICE_TIMEOUT"):
        monkeypatch.setattr(client, name, 300.0)


@pytest.fixture
def server(monkeypatch):
    with serving(Wandb()) as made:
        monkeypatch.setenv("WANDB_BASE_URL", made.url)
        yield made


def start(folder, notes, **more):
    config = WandbConfig(mode=WandbMode.online, project="unit", init_timeout=more.pop("init_timeout", 300.0))
    recorded = {
        "run": {"name": "a run"},
        "tracking": {"wandb": {"project": "unit", "entity": None, "group": None, "tags": []}},
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(recorded))
    return Tracker(TrackingConfig(wandb=config), folder, "a run", recorded, note=notes.append, **more)


def steps(server, run=RUN):
    return [row["train/step"] for row in server.history(run)]


def wait_until_ready(tracker):
    """Wait until W&B has accepted the run."""
    wait_for(lambda: tracker._clients[0].ready)


def sync_command(notes, program):
    """The words of the command that the last note suggests."""
    words = shlex.split(notes[-1].split("To upload it: ")[1])
    assert words[:2] == [program, "sync"], notes
    return words


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["refused", "silent", 500, 401])
def test_server_that_refuses_the_run_leaves_an_offline_run_to_sync(tmp_path, server, monkeypatch, fault):
    server.mode = fault
    if fault == "refused":
        monkeypatch.setenv("WANDB_BASE_URL", refused())
    late, go = tmp_path / "late.py", tmp_path / "go"
    late.write_text(
        f"import pathlib, sys, time\nwhile not pathlib.Path({str(go)!r}).exists():\n    time.sleep(0.01)\n"
        f"sys.path.insert(0, {str(client.PROGRAM.parent)!r})\nimport worker\nworker.main()\n"
    )
    monkeypatch.setattr(client, "PROGRAM", late)
    notes: list[str] = []
    tracker = start(tmp_path / "run", notes, wandb_id=RUN, init_timeout=1.0)
    for step in (1, 2, 3):
        tracker.log(step, {"train/loss": 1.0 / step})
    before = list(notes)
    go.touch()
    tracker.finish()
    assert not before, "start and logging must not wait for W&B"
    assert len([note for note in notes if "W&B did not take the run" in note]) == 1, notes
    words = sync_command(notes, "wandb")
    server.mode = "works"
    if fault in ("refused", 401):  # the other faults leave the same files
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        subprocess.run([sys.executable, "-m", *words], check=True, capture_output=True, timeout=600)
        assert steps(server) == [1, 2, 3]
        assert [row["train/loss"] for row in server.history(RUN)] == [1.0, 0.5, pytest.approx(1 / 3)]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["silent", "breaks", 401])
def test_server_lost_midway_has_every_step_once_after_sync(tmp_path, server, monkeypatch, fault, capsys):
    """W&B's library reports a silent server as an incomplete upload, and the other faults as success."""
    notes: list[str] = []
    with start(tmp_path / "run", notes, wandb_id=RUN) as tracker:
        for step in range(1, 6):
            tracker.log(step, {"train/loss": 1.0})
            tracker.log(step, {"eval/loss": 2.0})
    assert steps(server) == [1, 2, 3, 4, 5]
    monkeypatch.setattr(client, "UPLOAD_TIMEOUT", 6.0)  # the next upload cannot end
    tracker = start(tmp_path / "run", notes, resume_step=5)
    wait_until_ready(tracker)
    server.mode = fault
    for step in range(6, 11):
        tracker.log(step, {"train/loss": 1.0})
    tracker.finish()
    assert len([note for note in notes if "did not finish" in note or "stopped working" in note]) == 1, notes
    words = sync_command(notes, "fxtune")
    server.mode = "works"
    for _ in range(2 if fault == 401 else 1):  # the second sync has nothing left to send
        assert main(words[1:]) == 0, capsys.readouterr()
        assert steps(server) == list(range(1, 11))
    assert all(row["eval/loss"] == 2.0 for row in server.history(RUN)[:5])


@pytest.mark.slow
def test_server_that_comes_back_before_the_end_gets_everything(tmp_path, server):
    notes: list[str] = []
    tracker = start(tmp_path / "run", notes, wandb_id=RUN)
    tracker.log(1, {"train/loss": 1.0})
    wait_until_ready(tracker)
    server.mode = 500
    tracker.log(2, {"train/loss": 1.0})
    seen = len(server.requests)
    Thread(
        target=lambda: (wait_for(lambda: len(server.requests) > seen + 1), setattr(server, "mode", "works"))
    ).start()
    tracker.finish()
    assert steps(server) == [1, 2]
    assert [note for note in notes if not note.startswith("W&B: http")] == []


STRETCH = """
import sys
from fxtune.tracking.tracker import Tracker, TrackingConfig, WandbConfig, WandbMode
config = TrackingConfig(wandb=WandbConfig(mode=WandbMode.online, project="unit", init_timeout=300))
tracker = Tracker(config, sys.argv[1], "a run", {}, note=print)
for step in range(1, 8):
    tracker.log(step, {"train/loss": 1.0})
sys.stdin.read()
"""


@pytest.mark.slow
def test_killed_run_resumes_as_the_same_wandb_run_with_each_step_once(tmp_path, server):
    """Killed during step 7, before a checkpoint saved its W&B id. It resumes after step 4 in the same folder."""
    folder = tmp_path / "run"
    with subprocess.Popen([sys.executable, "-c", STRETCH, str(folder)], stdin=subprocess.PIPE) as process:
        wait_for(lambda: server.rows and len(server.history(next(iter(server.rows)))) == 6)
        process.kill()
    wait_for(lambda: server.ends)
    [run] = server.rows
    assert server.ends == [1], "W&B shows it as failed"
    assert steps(server, run) == [1, 2, 3, 4, 5, 6], "step 7 may be incomplete"
    notes: list[str] = []
    tracker = start(folder, notes, resume_step=4)
    assert tracker.wandb_id == run
    for step in range(5, 10):
        tracker.log(step, {"train/loss": 1.0})
    tracker.finish()
    assert steps(server, run) == list(range(1, 10))
    assert [json.loads(line)["train/step"] for line in (folder / "metrics.jsonl").open()] == list(range(1, 10))


@pytest.mark.slow
def test_resumed_run_sends_what_it_could_not_send_before(tmp_path, server, monkeypatch):
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


@pytest.mark.slow
def test_stopped_run_does_not_wait_for_a_silent_server(tmp_path, server):
    notes: list[str] = []
    tracker = start(tmp_path / "run", notes, wandb_id=RUN)
    tracker.log(1, {"train/loss": 1.0})
    wait_until_ready(tracker)
    server.mode = "silent"
    tracker.log(2, {"train/loss": 1.0})
    process = tracker._clients[0].process
    tracker.finish(exit_code=75)
    assert process.poll() is None, "its upload still goes on"
    process.kill()


@pytest.mark.slow
def test_sync_reports_why_it_cannot_upload(tmp_path, monkeypatch, capsys):
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


@pytest.mark.slow
def test_run_with_a_silent_hub_and_a_silent_wandb_trains_on_local_files(tmp_path):
    """Neither server answers. Local files need no request to the hub."""
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
            timeout=600,
            cwd=tmp_path,
        )
    assert done.returncode == 0, done.stderr
    assert asked == []
    assert "W&B did not take the run" in done.stdout
    folder = Path(shlex.split(done.stdout.split("To upload it: wandb sync ")[-1])[0])
    assert folder.is_dir()
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert {json.loads(line)["train/step"] for line in lines} == {1, 2}
