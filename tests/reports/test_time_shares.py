"""Where the time of a run went."""

import json

import pytest
from support.recorded import record

from fxtune.reports.run_files import RunFiles
from fxtune.reports.time_shares import step_parts, time_shares


def test_the_parts_add_up_to_the_whole_time(tmp_path):
    parts = time_shares(
        RunFiles(record(tmp_path / "run", lines=[{"train/step": 40, "checkpoint/stall_seconds": 0.3}]))
    )
    assert sum(part.seconds for part in parts) == pytest.approx(100.0)
    assert {part.key: round(part.seconds, 6) for part in parts} == {
        "startup": 10.0,
        "data": 0.8,
        "passes": 76.0,
        "update": 2.0,
        "saving": 0.3,
        "rest": 0.9,
        "evaluation": 8.0,
        "other": 2.0,
    }


def test_a_line_counts_as_many_steps_as_it_is_of(tmp_path):
    folder = record(tmp_path / "run")
    rows = [
        {"train/step": 1, "train/step_seconds": 11.0, "train/data_wait": 0.5, "train/update_seconds": 5.0},
        {"train/step": 11, "train/step_seconds": 1.0, "train/data_wait": 0.0, "train/update_seconds": 0.2},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = {part.key: part.seconds for part in step_parts(RunFiles(folder))}
    assert found == {"data": pytest.approx(5.5), "update": pytest.approx(7.0), "saving": 0.0}


def test_a_resumed_run_counts_both_starts(tmp_path):
    again = {"train/step": 30, "startup/imports_seconds": 5.0, "startup/first_steps_seconds": 2.0}
    (start,) = (
        part for part in time_shares(RunFiles(record(tmp_path / "run", lines=[again]))) if part.key == "startup"
    )
    assert start.seconds == 15.0
