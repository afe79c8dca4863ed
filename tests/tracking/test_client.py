"""W&B as a process of its own: offline, killed, hanging, online. A server that fails: tests/faults/test_wandb.py."""

import json
import os
import signal
import struct
from pathlib import Path

import pytest
from support.harness import wait_for
from support.processes import children, command_line
from support.runs import history
from support.servers import Wandb, serving
from support.tracking import start

from fxtune.tracking import client
from fxtune.tracking.tracker import WandbMode

CANARY = "canary-7f3e-never-upload-me"


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Long timeouts for a working W&B on a busy machine."""
    for name in ("END_TIMEOUT", "UPLOAD_TIMEOUT", "START_TIMEOUT", "SERVICE_TIMEOUT"):
        monkeypatch.setattr(client, name, 300.0)


def records(folder):
    """The records of the only .wandb file under `folder`: LevelDB's log format after a header of seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    [file] = folder.glob("**/*.wandb")
    data, at, part, found = file.read_bytes(), 7, b"", []
    while at < len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            found.append(Record.FromString(part))
            part = b""
    return found


def sent_rows(found):
    rows = []
    for record in found:
        if record.HasField("history"):
            rows.append(
                {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            )
    return rows


def test_offline_run_has_all_rows_and_resumes_under_its_id(tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", CANARY)
    monkeypatch.setattr("sys.argv", ["fxtune", "+recipe=x", f"hub.token={CANARY}"])
    config = {
        "model": {"path": "m", "hub_token": "hf_" + "x" * 20},
        "note": f"see https://u:{CANARY}@host/x",
        "optimizer": {"lr": 1e-4},
    }
    notes: list[str] = []
    first = start(tmp_path / "one", WandbMode.offline, notes, config)
    for step in (1, 2, 3):
        first.log(step, {"train/loss": 1 / step, "eval/loss": 2.0})
    first.finish({"questions/exact_match": 0.5})
    second = start(tmp_path / "two", WandbMode.offline, wandb_id=first.wandb_id, resume_step=3)
    second.log(4, {"train/loss": 0.1})
    second.finish()

    found = records(tmp_path / "one")
    [run] = {record.run.run_id: record.run for record in found if record.HasField("run")}.values()
    assert (run.run_id, run.display_name, run.project, run.run_group) == (first.wandb_id, "my run", "unit", "g")
    assert list(run.tags) == ["a", "b"]
    values = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert values["optimizer"] == {"lr": 1e-4}
    assert values["model"] == {"path": "m", "hub_token": "[redacted]"}
    rows = sent_rows(found)
    assert [(row["train/step"], row["train/loss"]) for row in rows] == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))]
    summary = {item.key: json.loads(item.value_json) for record in found for item in record.summary.update}
    assert summary["questions/exact_match"] == 0.5
    axes = {
        metric.glob_name or metric.name: metric.step_metric
        for metric in (record.metric for record in found if record.HasField("metric"))
    }
    assert axes["*"] == "train/step"
    again = records(tmp_path / "two")
    assert {record.run.run_id for record in again if record.HasField("run")} == {first.wandb_id}
    assert [row["train/step"] for row in sent_rows(again)] == [4]
    for file in (path for path in tmp_path.rglob("*") if path.is_file()):
        assert CANARY.encode() not in file.read_bytes(), file
    [sync] = [note for note in notes if "wandb sync" in note]  # the first run's; the second one has notes of its own
    assert Path(sync.split("wandb sync ")[1]).is_dir()


def descendants(pid):
    own = children(pid)
    return own + [pid for child in own for pid in descendants(child)]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds W&B's service through /proc")
def test_killing_the_wandb_service_stops_neither_training_nor_the_exit(tmp_path):
    notes: list[str] = []
    tracker = start(tmp_path, WandbMode.offline, notes)
    tracker.log(1, {"train/loss": 1.0})
    wait_for(lambda: tracker._clients[0].ready)
    services = [pid for pid in descendants(tracker._clients[0].process.pid) if "wandb-core" in command_line(pid)]
    assert services
    for pid in services:
        os.kill(pid, signal.SIGKILL)
    for step in range(2, 22):
        tracker.log(step, {"train/loss": 1.0})
    tracker.finish()
    assert len([note for note in notes if "stopped working" in note or "did not finish" in note]) == 1
    assert len(history(tmp_path)) == 21
    whole = sorted(tmp_path.glob("wandb/offline-run-*"))[-1]  # that of the process that took its place
    assert [row["train/step"] for row in sent_rows(records(whole))] == list(range(1, 22))
    assert notes[-1].endswith(f"To upload it: wandb sync {whole}")


def test_logging_does_not_wait_for_wandb_to_start_and_one_that_hangs_at_the_end_is_killed(tmp_path, monkeypatch):
    """It starts when all steps are logged, and then reads nothing."""
    stub, go = tmp_path / "stub.py", tmp_path / "go"
    ready = '{"imported": true}\\n{"ready": {"url": "", "last": -1}}'
    stub.write_text(
        f"import pathlib, time\nwhile not pathlib.Path({str(go)!r}).exists():\n    time.sleep(0.01)\n"
        f"print('{ready}', flush=True)\ntime.sleep(6000)\n"
    )
    monkeypatch.setattr(client, "PROGRAM", stub)
    monkeypatch.setattr(client, "END_TIMEOUT", 0.5)
    notes: list[str] = []
    tracker = start(tmp_path, WandbMode.offline, notes, init_timeout=0.5)
    for step in range(3000):
        tracker.log(step, {"train/loss": 1.0, "words": "x" * 50})
    assert not tracker._clients[0].ready
    go.touch()
    wait_for(lambda: tracker._clients[0].ready)
    process = tracker._clients[0].process
    tracker.finish()
    assert process.wait(timeout=600) != 0
    assert any("left behind" in note for note in notes)


@pytest.fixture
def wandb_server(monkeypatch):
    with serving(Wandb()) as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
        yield server


def test_online_history_reaches_the_server_under_the_given_id(tmp_path, wandb_server):
    notes: list[str] = []
    tracker = start(tmp_path, WandbMode.auto, notes, wandb_id="abcd1234")
    tracker.log(7, {"train/loss": 0.25})
    tracker.finish()
    assert any("/runs/abcd1234" in note for note in notes), notes
    assert {upsert["name"] for upsert in wandb_server.upserts} == {"abcd1234"}
    assert [(row["train/step"], row["train/loss"]) for row in wandb_server.history("abcd1234")] == [(7, 0.25)]
