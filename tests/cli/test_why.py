"""`fxtune why`: what it prints and writes."""

import json

import pytest
from support.recorded import record

from fxtune.cli.main import main


def test_the_command_prints_and_writes_what_it_found(tmp_path, capsys):
    folder = record(tmp_path / "run", {"train/data_wait": 0.2, "train/forward_backward_seconds": 1.5})
    assert main(["why", str(folder), "--json", str(tmp_path / "why.json")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "loader.num_workers=2" in shown
    written = json.loads((tmp_path / "why.json").read_text())
    assert written["findings"][0]["keys"] == ["loader.num_workers=2"]
    assert sum(part["seconds"] for part in written["parts"]) == pytest.approx(100)


def test_a_run_of_an_earlier_version_has_no_times(tmp_path, capsys):
    times = [
        "train/forward_backward_seconds",
        "train/update_seconds",
        "time/total_seconds",
        "time/training_seconds",
        "time/evaluation_seconds",
    ]
    folder = record(tmp_path / "run", dict.fromkeys(times))
    (folder / "result.json").unlink()
    assert main(["why", str(folder)]) == 0
    assert capsys.readouterr().out.startswith("This run has recorded no times")
