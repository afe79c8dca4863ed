"""`fxtune diff`: what it prints and writes."""

import json

import yaml

from fxtune.cli.main import main


def run_folder(path, lr, losses):
    path.mkdir()
    config = {"run": {"name": path.name}, "optimizer": {"lr": lr}}
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    (path / "setting.json").write_text(json.dumps({"machine": {"torch": "2.13"}, "data": {"a": "8 documents"}}))
    rows = [{"train/step": step, "train/loss": loss} for step, loss in enumerate(losses, 1)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_it_prints_what_differs_and_writes_it(tmp_path, capsys):
    first = run_folder(tmp_path / "a", 1e-3, (1.0, 0.5, 0.25))
    second = run_folder(tmp_path / "b", 2e-3, (1.0, 0.4, 0.2))
    assert main(["diff", str(first), str(second), "--json", str(tmp_path / "d.json")]) == 0
    shown = capsys.readouterr().out
    assert "optimizer.lr" in shown
    assert "0.002" in shown
    assert "differ from step 2 on" in shown
    assert "Equal: machine and packages, data." in shown
    written = json.loads((tmp_path / "d.json").read_text())
    assert written["recipe"] == [{"key": "optimizer.lr", "first": 1e-3, "second": 2e-3}]
    assert not written["equal"]


def test_a_name_of_no_run_is_one_message(tmp_path, capsys):
    assert main(["diff", "no-run-a", "no-run-b"]) == 2
    assert "there is no run `no-run-a`" in capsys.readouterr().err
