"""`fxtune sync` of what cannot be sent: one message that says why."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from support.harness import small_disk

from fxtune.cli.main import main
from fxtune.system.machine.facts import BROKEN


def write_run(folder: Path) -> None:
    folder.mkdir()
    wandb = "{project: mine, entity: null, group: null, tags: []}"
    (folder / "config.yaml").write_text(f"run: {{name: mine}}\ntracking: {{wandb: {wandb}}}\n")
    (folder / "metrics.jsonl").write_text('{"train/step": 1, "train/loss": 2.0}\n')


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)


def test_folder_without_a_run_is_refused(tmp_path, capsys):
    assert main(["sync", str(tmp_path)]) == 2
    assert f"{tmp_path} holds no run" in capsys.readouterr().err


def test_missing_package_is_refused_with_its_install_command(tmp_path, capsys, monkeypatch):
    write_run(tmp_path / "run")
    monkeypatch.setitem(BROKEN, "wandb", "it counts as missing")
    assert main(["sync", str(tmp_path / "run")]) == 2
    assert "pip install wandb" in capsys.readouterr().err


def test_read_only_disk_is_an_error(tmp_path, capsys):
    with small_disk(tmp_path / "disk") as disk:
        write_run(disk / "run")
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        assert main(["sync", str(disk / "run")]) == 6
    said = capsys.readouterr().err
    assert "Read-only file system" in said
    assert "copy" in said
