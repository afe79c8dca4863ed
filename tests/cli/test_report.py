"""`fxtune report`: which runs it takes, and where the page goes."""

from support.recorded import record

from fxtune.cli.main import main


def test_the_command_writes_beside_the_first_run(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "mine-2"):
        record(tmp_path / "runs" / name)
    assert main(["report", "mine-2"]) == 0
    assert (tmp_path / "runs" / "mine-2" / "report.html").exists()
    assert main(["report", "runs/mine", "mine-2"]) == 0
    assert "runs/report.html" in capsys.readouterr().out
    assert main(["report", "runs", "--output", "all.html"]) == 0  # a folder of runs
    assert "2 runs side by side" in (tmp_path / "all.html").read_text()
    assert main(["report", *map(str, sorted((tmp_path / "runs").glob("*")))]) == 0  # and the page of before among them
    assert "2 runs side by side" in (tmp_path / "runs" / "report.html").read_text()


def test_a_mistake_is_one_message(cwd, capsys):
    assert main(["report", "no-run"]) == 2
    assert "there is no run `no-run`" in capsys.readouterr().err
    assert main(["report"]) == 2
    assert "usage: fxtune report RUN [MORE ...]" in capsys.readouterr().err
    (cwd / "empty").mkdir()
    assert main(["report", "empty"]) == 2
    assert "is no run of fxtune" in capsys.readouterr().err
    record(cwd / "run")
    assert main(["report", "run", "--output", "no/folder/x.html"]) == 6
    assert "or name another file." in capsys.readouterr().err
