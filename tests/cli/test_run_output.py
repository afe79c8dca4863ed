"""The model or adapter of a run, found by the run's folder, its name, or the folder of the output itself."""

from __future__ import annotations

import os

import pytest

from fxtune.cli.run_output import find_output
from fxtune.errors import ConfigError


def made(folder, file: str) -> None:
    folder.mkdir(parents=True)
    (folder / file).write_text("{}")


def test_newest_run_of_a_name_is_found(cwd):
    for age, name in enumerate(("lamp-3", "lamp-2", "lamp", "lamp-shade")):
        made(cwd / "runs" / name / "adapter", "adapter_config.json")
        os.utime(cwd / "runs" / name, (0, 1000 - age))
    os.utime(cwd / "runs" / "lamp-2", (0, 2000))
    found = find_output("lamp")
    assert (str(found.folder), found.is_adapter) == ("runs/lamp-2/adapter", True)


def test_folders_of_runs_models_and_adapters_are_found(tmp_path):
    made(tmp_path / "run" / "model", "config.json")
    (tmp_path / "run" / "config.yaml").write_text("run: {name: mine}\n")
    for path in (tmp_path / "run", tmp_path / "run" / "model"):
        found = find_output(str(path))
        assert (found.folder, found.is_adapter) == (tmp_path / "run" / "model", False)
        assert found.config["run"]["name"] == "mine"
    made(tmp_path / "alone", "adapter_config.json")
    assert find_output(str(tmp_path / "alone")).config == {}


def test_what_holds_no_output_is_refused_with_what_to_do(cwd):
    (cwd / "runs" / "lamp" / "checkpoints" / "step-00000002").mkdir(parents=True)
    (cwd / "runs" / "lamp" / "config.yaml").write_text("run: {name: lamp}\n")
    for name, message in (
        ("lamp", "the training has not finished"),
        ("lmap", "there is no run `lmap`.*did you mean `lamp`"),
        ("runs/lamp/checkpoints/step-00000002", "is a checkpoint. Write its model first"),
        ("runs", "is no run, adapter or model"),
    ):
        with pytest.raises(ConfigError, match=message):
            find_output(name)
