"""The processes of MLflow, Trackio and TensorBoard, with the real libraries and local stores: each has the figures of
metrics.jsonl, and cannot stop a run. W&B's: test_client.py and tests/faults/test_wandb.py.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.harness import wait_for
from support.runs import history
from support.servers import refused

from fxtune.cli.main import main
from fxtune.facts.run import Facts
from fxtune.tracking import client
from fxtune.tracking.tracker import Tracker, TrackingConfig, check

NAMES = [
    pytest.param(name, marks=[pytest.mark.skipif(find_spec(name) is None, reason=f"needs {name}"), *marks])
    for name, marks in (("tensorboard", []), ("mlflow", [pytest.mark.slow]), ("trackio", []))
]
CONFIG = {"optimizer": {"lr": 1e-4}, "hub_token": "hf_" + "x" * 20}


@pytest.fixture(autouse=True)
def stores(monkeypatch, tmp_path):
    """Local stores, and long timeouts for libraries on a busy machine."""
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    for name in ("END_TIMEOUT", "UPLOAD_TIMEOUT", "START_TIMEOUT", "SERVICE_TIMEOUT"):
        monkeypatch.setattr(client, name, 300.0)


def config(name):
    return TrackingConfig(**{name: name == "tensorboard" or "unit"})


def start(name, folder, notes, **more):
    return Tracker(config(name), folder / "run", "my run", CONFIG, note=notes.append, **more)


READ = {
    "tensorboard": """
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        reader = EventAccumulator(folder + "/run/tensorboard")
        reader.Reload()
        rows = [(tag, e.step, e.value) for tag in reader.Tags()["scalars"] for e in reader.Scalars(tag)]
        about = []
    """,
    "mlflow": """
        from mlflow import MlflowClient
        client = MlflowClient("sqlite:///" + folder + "/mlflow.db")
        [run] = client.search_runs([client.get_experiment_by_name("unit").experiment_id])
        rows = [(k, m.step, m.value) for k in run.data.metrics for m in client.get_metric_history(run.info.run_id, k)]
        about = [run.info.run_name, run.info.status, run.data.params["optimizer.lr"], run.data.params["hub_token"]]
    """,
    "trackio": """
        import trackio
        [run] = trackio.Api().runs("unit")
        logs = trackio.SQLiteStorage.get_logs("unit", run.name, run_id=run.id)
        rows = [(k, row["step"], v) for row in logs for k, v in row.items() if isinstance(v, (int, float))]
        about = [run.name.rpartition("-")[0], "FINISHED", str(run.config["optimizer"]["lr"]), run.config["hub_token"]]
    """,
}
"""Reads (figure, step, value) and what the tracker knows about its only run, in a process of its own: the libraries
log, and keep their settings."""


def read(name, folder):
    script = f"folder = {str(folder)!r}\n{textwrap.dedent(READ[name])}\nprint('READ', [rows, about])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    rows, about = eval(done.stdout.rpartition("READ ")[2])
    return sorted(row for row in rows if row[0] not in ("step", "train/step")), about


def logged(folder):
    """The figures of metrics.jsonl, as read() returns those of a tracker."""
    return sorted(
        (key, line["train/step"], value)
        for line in history(folder / "run")
        for key, value in line.items()
        if key not in ("time", "train/step") and not isinstance(value, str)
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("early", [False, True])
def test_tracker_has_the_figures_of_a_run_that_was_killed_and_resumed(tmp_path, name, early):
    """Killed in step 4, `early`: before the tracker accepted the run, and resumed at once from a checkpoint of step 3."""
    script = f"""
        import os, sys
        early = {early}
        from pathlib import Path
        sys.path.insert(0, {str(Path(__file__).parents[1])!r})
        from tracking.test_worker import start, wait_for
        tracker = start({name!r}, Path({str(tmp_path)!r}), [])
        for step in (1, 2, 3, 4):
            wait_for(lambda: tracker._clients[0].ready or early)
            tracker.log(step, {{"train/loss": 1.0 / 2**step, "words": "text"}})
            if step < 4:
                tracker.log(step, {{"eval/loss": 2.0 * step}})
        os.kill(os.getpid(), 9)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=False, capture_output=True)
    notes: list[str] = []
    with start(name, tmp_path, notes, resume_step=3) as tracker:
        for step in (4, 5):
            tracker.log(step, {"train/loss": 1.0 / 2**step, "eval/loss": 2.0 * step})
        tracker.summary({"eval/best_loss": 0.5})
    rows, about = read(name, tmp_path)
    assert rows == sorted([*logged(tmp_path), ("eval/best_loss", 5, 0.5)])
    assert about in ([], ["my run", "FINISHED", "0.0001", "[redacted]"])
    assert not [note for note in notes if "Training goes on" in note or "Warning" in note], notes


@pytest.mark.parametrize("name", NAMES)
def test_tracker_that_raises_stops_no_run_and_sync_sends_the_missing_steps(tmp_path, monkeypatch, name, capsys):
    program = tmp_path / "worker.py"
    program.write_text(
        f"import sys\nsys.path.insert(0, {str(client.PROGRAM.parent)!r})\nimport worker\n"
        "def broken(self, row):\n    raise RuntimeError('no room')\n"
        "for kind in worker.TRACKERS.values():\n    kind.log = broken\nworker.main()\n"
    )
    notes: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(client, "PROGRAM", program)
        with start(name, tmp_path, notes) as tracker:
            for step in (1, 2, 3):
                tracker.log(step, {"train/loss": 1.0 * step})
    [lost] = [note for note in notes if "no room" in note]
    assert lost.endswith(f"fxtune sync {tmp_path / 'run'}")
    recorded = {"run": {"name": "my run"}, "tracking": dataclasses.asdict(config(name)), **CONFIG}
    (tmp_path / "run" / "config.yaml").write_text(json.dumps(recorded))
    assert main(["sync", str(tmp_path / "run")]) == 0, capsys.readouterr()
    assert read(name, tmp_path)[0] == logged(tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("mlflow") is None, reason="needs mlflow")
def test_unreachable_server_of_mlflow_neither_stops_nor_slows_a_run(tmp_path, monkeypatch):
    notes: list[str] = []
    monkeypatch.setenv("MLFLOW_TRACKING_URI", refused())
    with start("mlflow", tmp_path, notes) as tracker:
        for step in range(1, 1001):
            tracker.log(step, {"train/loss": 1.0})
        assert not notes, "start and logging must not wait for MLflow"
    assert len(notes) == 1, notes
    assert notes[0].endswith(f"fxtune sync {tmp_path / 'run'}")
    assert len(history(tmp_path / "run")) == 1000


@pytest.mark.slow
@pytest.mark.skipif(find_spec("mlflow") is None, reason="needs mlflow")
def test_rows_wait_while_the_server_of_mlflow_is_away(tmp_path, monkeypatch):
    away = tmp_path / "away"
    program = tmp_path / "worker.py"
    program.write_text(
        f"import os, sys\nsys.path.insert(0, {str(client.PROGRAM.parent)!r})\nimport mlflow, worker\n"
        "real = mlflow.MlflowClient.log_batch\n"
        "def log_batch(self, run, **given):\n"
        f"    if given.get('metrics') and not os.path.exists({str(away)!r}):\n"
        f"        open({str(away)!r}, 'w').close()\n        raise mlflow.MlflowException('away')\n"
        "    real(self, run, **given)\n"
        "mlflow.MlflowClient.log_batch = log_batch\nworker.main()\n"
    )
    monkeypatch.setattr(client, "PROGRAM", program)
    notes: list[str] = []
    with start("mlflow", tmp_path, notes) as tracker:
        for step in (1, 2, 3):
            tracker.log(step, {"train/loss": 1.0 * step})
        wait_for(away.exists)
    assert not [note for note in notes if "away" in note], notes
    assert read("mlflow", tmp_path)[0] == logged(tmp_path)


def test_missing_package_is_refused_with_its_install_command():
    for name in ("tensorboard", "mlflow", "trackio"):
        [reason] = check(config(name), Facts())
        assert f'pip install "fxtune[{name}]"' in reason
