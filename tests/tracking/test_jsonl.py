"""metrics.jsonl: complete lines, each step once, whatever a kill or a full disk leaves."""

import tempfile
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.runs import history
from support.tracking import start


def test_metrics_are_flushed_line_by_line_with_nan_as_null(tmp_path, monkeypatch):
    tracker = start(tmp_path)
    monkeypatch.setattr(time, "time", lambda: 1234.5)
    tracker.log(1, {"train/loss": torch.tensor(2.5), "train/lr": float("nan"), "train/grad_norm": float("inf")})
    [line] = history(tmp_path)  # before finish: each line is on disk at once
    assert line.pop("time") == 1234.5
    assert line == {"train/step": 1, "train/loss": 2.5, "train/lr": None, "train/grad_norm": None}
    tracker.finish({"questions/exact_match": 0.9})
    tracker.finish()
    assert tracker.wandb_id is None


def test_resume_drops_lines_of_repeated_steps_and_an_incomplete_line(tmp_path):
    with start(tmp_path) as tracker:
        for step in range(1, 8):
            tracker.log(step, {"train/loss": step})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"train/step": 3, "train/lo')  # what a kill within a write leaves
    with start(tmp_path, resume_step=4) as tracker:
        tracker.log(5, {"train/loss": 50})
    assert [(line["train/step"], line["train/loss"]) for line in history(tmp_path)] == [
        (1, 1),
        (2, 2),
        (3, 3),
        (4, 4),
        (5, 50),
    ]
    with start(tmp_path):
        pass
    assert history(tmp_path) == []


@settings(max_examples=60)
@given(cut=st.integers(0, 400), step=st.integers(1, 6), junk=st.binary(max_size=12))
def test_after_any_kill_each_line_is_complete_and_each_step_is_there_once(cut, step, junk):
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        with start(folder) as tracker:
            for number in range(1, 7):
                tracker.log(number, {"train/loss": number})
        file = folder / "metrics.jsonl"
        whole = file.read_bytes()
        file.write_bytes(whole[:cut] + junk)
        left = list(range(1, min(step, whole[:cut].count(b"\n")) + 1))
        with start(folder, resume_step=step) as tracker:
            for number in range(step + 1, 9):
                tracker.log(number, {"train/loss": number})
        seen = [line["train/step"] for line in history(folder)]
        assert seen[: len(left)] == left
        assert [number for number in seen if number > step] == list(range(step + 1, 9))
        assert seen == sorted(set(seen))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_does_not_stop_training(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    notes = []
    tracker = start(tmp_path, notes=notes)
    tracker.log(1, {"train/loss": 1.0})
    tracker.log(2, {"train/loss": 1.0})
    tracker.finish()
    assert len([note for note in notes if "could not be written at step 1" in note]) == 1


def test_unwritable_run_folder_is_a_note(tmp_path):
    (tmp_path / "run").write_text("a file where a folder should be")
    notes = []
    tracker = start(tmp_path / "run", notes=notes)
    tracker.log(1, {"train/loss": 1.0})
    tracker.summary({"a": 1})
    tracker.finish()
    assert any("training goes on" in note for note in notes)
