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


def write_answers(run, step, *answers):
    folder = run / "rollouts" / f"step-{step:08d}"
    folder.mkdir(parents=True)
    lines = [
        {"where": f"rows.jsonl:{row}", "ids": ids, "text": text, "reward": reward, "finished": True}
        for row, ids, text, reward in answers
    ]
    (folder / "answers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_first_step_with_other_answers_is_named_and_its_answers_are_shown(tmp_path, capsys):
    first, second = (run_folder(tmp_path / name, 1e-3, (1.0, 0.5)) for name in "ab")
    for run in (first, second):
        with (run / "metrics.jsonl").open("a") as out:
            row = {"train/step": 1, "rollout/reward": 0.5, "eval/reward": 0.25, "rollout/sampling_seconds": 2.5}
            out.write(json.dumps(row) + "\n")
        write_answers(run, 1, (1, [5, 2], "lamps", 1.0), (2, [6, 2], "tents", 0.0))
    assert main(["diff", str(first), str(second), "--json", str(tmp_path / "d.json")]) == 0
    written = json.loads((tmp_path / "d.json").read_text())
    assert {"metric": "answers", "common": 1, "step": None, "largest": None} in written["partings"]
    assert {figure["key"] for figure in written["figures"]} >= {
        *("rollout/reward", "eval/reward", "rollout/sampling_seconds")
    }
    assert written["equal"]
    capsys.readouterr()
    write_answers(first, 2, (1, [5, 2], "lamps", 1.0), (3, [7, 2], "Rome", 0.0))
    write_answers(second, 2, (1, [5, 2], "lamps", 1.0), (3, [7, 2], "Rome", 1.0), (4, [8], "Oslo", 0.0))
    assert main(["diff", str(first), str(second), "--json", str(tmp_path / "d.json")]) == 0
    assert "differ from step 2 on" in capsys.readouterr().out
    written = json.loads((tmp_path / "d.json").read_text())
    assert written["answers"] == [
        {"key": "rows.jsonl:3", "first": "0: Rome", "second": "1: Rome"},
        {"key": "rows.jsonl:4", "first": None, "second": "0: Oslo"},
    ]
    assert not written["equal"]


def test_a_name_of_no_run_is_one_message(tmp_path, capsys):
    assert main(["diff", "no-run-a", "no-run-b"]) == 2
    assert "there is no run `no-run-a`" in capsys.readouterr().err
