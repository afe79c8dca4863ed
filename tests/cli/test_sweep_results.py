"""The results of a sweep: a table of its runs, and sweep.json."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

from support.recipes import QUICK

from fxtune.cli import main as command
from fxtune.cli.sweep_results import SweepRun, show_results
from fxtune.errors import NumbersError


def test_sweep_ends_with_a_table_sorted_by_held_out_loss(cwd, trained, capsys, monkeypatch):
    figures = {
        1e-3: {"train/step": 9, "train/loss": 0.5, "eval/loss": 1.5},
        1e-2: {"train/step": 9, "train/loss": 0.4, "eval/loss": 1.4, "eval/best_loss": 1.25, "eval/best_step": 6},
        0.05: {"train/step": 9, "train/loss": 0.3, "eval/loss": math.nan},
    }

    def run(config):
        if config.optimizer.lr > 0.05:
            raise NumbersError("diverged")
        Path(config.run.dir).mkdir(parents=True)
        return figures[config.optimizer.lr]

    monkeypatch.setattr(sys.modules["fxtune.cli.stand_in_train"], "run", run)
    monkeypatch.setenv("COLUMNS", "200")
    assert command.main(["-m", QUICK, "optimizer.lr=0.1,0.05,1e-3,1e-2"]) == 5
    table = [line for line in capsys.readouterr().out.splitlines() if "optimizer.lr=" in line]
    assert [line.replace("│", " ").split() for line in table] == [
        ["optimizer.lr=0.01", "1.2500", "6", "0.4000", "runs/quickstart/optimizer.lr=0.01"],
        ["optimizer.lr=0.001", "1.5000", "9", "0.5000", "runs/quickstart/optimizer.lr=0.001"],
        ["optimizer.lr=0.05", "nan", "9", "0.3000", "runs/quickstart/optimizer.lr=0.05"],
        ["optimizer.lr=0.1", "failed", "runs/quickstart/optimizer.lr=0.1"],
    ]
    written = json.loads(Path("runs/quickstart/sweep.json").read_text())["runs"]
    assert [run["changes"] for run in written] == [line.replace("│", " ").split()[0] for line in table]
    assert written[0]["figures"] == figures[1e-2]
    assert written[3]["error"] == "diverged"


def test_the_measures_of_an_objective_are_columns(tmp_path, capsys):
    figures = {"train/loss": 0.5, "eval/loss": 0.75, "before/loss": 2.0, "before/f1": 0.25, "eval/f1": 0.875}
    show_results([SweepRun("optimizer.lr=0.1", "one", figures=figures)], tmp_path)
    lines = [line.replace("│", " ").replace("┃", " ").split() for line in capsys.readouterr().out.splitlines()]
    assert ["run", "held-out", "loss", "training", "loss", "f1", "folder"] in lines
    assert ["optimizer.lr=0.1", "0.7500", "0.5000", "0.8750", "one"] in lines


def test_runs_with_other_held_out_tokens_are_said_to_be_incomparable(tmp_path, capsys):
    runs = []
    for name, tokens in ("a", 189), ("b", 189), ("c", 21):
        (tmp_path / name).mkdir()
        (tmp_path / name / "about.json").write_text(
            json.dumps({"held_out": {"documents": 11, "supervised_tokens": tokens}})
        )
        runs.append(SweepRun(name, str(tmp_path / name), figures={"eval/loss": 1.0}))
    show_results(runs[:2], tmp_path)
    assert "cannot be compared" not in capsys.readouterr().out
    show_results(runs, tmp_path)
    assert "cannot be compared" in capsys.readouterr().out


def test_runs_with_other_objectives_are_said_to_be_incomparable(tmp_path, capsys):
    for word, incomparable in (("objective.beta", True), ("optimizer.lr", False)):
        show_results([SweepRun(f"{word}={value}", "") for value in (0.1, 0.5)], tmp_path)
        assert ("cannot be compared" in capsys.readouterr().out) == incomparable
