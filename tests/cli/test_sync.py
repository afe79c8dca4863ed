"""`fxtune sync` without a run to send."""

from __future__ import annotations

from fxtune.cli.main import main


def test_folder_without_a_run_is_refused(tmp_path, capsys):
    assert main(["sync", str(tmp_path)]) == 2
    assert f"{tmp_path} holds no run" in capsys.readouterr().err
