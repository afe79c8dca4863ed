"""The files of a run, read as they are now."""

import pytest
from support.recorded import record

from fxtune.errors import ConfigError, StorageError
from fxtune.reports.run_files import RunFiles


def test_a_finished_run(tmp_path):
    run = RunFiles(record(tmp_path / "run"))
    assert run.finished
    assert run.curves["eval/loss"] == {20: 0.25, 40: 0.125}
    assert run.last["time/total_seconds"] == 100.0  # of result.json, which is written last
    assert run.answers("after") == [{"question": "What?", "right": "right", "answer": "right"}]
    assert run.evidence[0]["technique"] == "lora"


def test_a_repeated_step_has_its_last_value(tmp_path):
    run = RunFiles(record(tmp_path / "run", lines=[{"train/step": 40, "train/loss": 9.0}, {"train/loss": 1.0}]))
    assert run.curves["train/loss"][40] == 9.0


def test_what_is_not_there_is_empty(tmp_path):
    (tmp_path / "config.yaml").write_text("run: {name: a}")
    run = RunFiles(tmp_path)
    assert not run.finished
    assert run.rows == run.evidence == run.answers("before") == []
    assert run.result == run.setting == run.about == run.curves == run.last == {}


def test_a_folder_without_a_run_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no config\.yaml"):
        RunFiles(tmp_path)


@pytest.mark.parametrize("name", ["result.json", "setting.json", "about.json", "evidence.json"])
def test_a_damaged_file_is_named(tmp_path, name):
    folder = record(tmp_path / "run")
    (folder / name).write_text("{")
    with pytest.raises(StorageError, match=rf"{name} cannot be read"):
        getattr(RunFiles(folder), name.removesuffix(".json"))
