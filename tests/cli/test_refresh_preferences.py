"""`fxtune refresh` of preferences: pairs and judged answers, without a reference and with the first run's."""

from __future__ import annotations

import json
import math
import random
import shutil
from pathlib import Path

import pytest
from support.rows import write_jsonl

from fxtune.cli.main import main

WORDS = [
    "data.sources=[{path: old.jsonl}]",
    "data.sequence_length=192",
    "data.eval_fraction=0.3",
    "model.init=random",
    "model.architecture={hidden_size: 64, intermediate_size: 96, num_hidden_layers: 1, num_attention_heads: 4, "
    "num_key_value_heads: 2, head_dim: 16}",
    "train.micro_batch_size=4",
    "train.global_batch_size=4",
    "train.max_steps=12",
    "optimizer.lr=1e-2",
    "tracking.display=plain",
    "run.report=false",
    "run.device=cpu",
]
LORA = "techniques.lora.enabled=true"
OLD, NEW = ("It is fine.", "Ask me again."), ("στο σπίτι", "πῦρ καὶ γῆ")
"""(the better answer, the worse one). In the new rows the answers are of other letters."""


def write(path: str, answers: tuple[str, str], first: int, judged: bool, count: int = 36) -> None:
    draw, rows = random.Random(first), []
    for number in range(first, first + count):
        good, bad = (f"{answer}{'!' * draw.randint(0, 3)}" for answer in answers)
        prompt = f"Which number is {number}?"
        if judged:
            is_good = draw.random() < 0.5
            rows.append({"prompt": prompt, "completion": f" {good if is_good else bad}", "label": is_good})
        else:
            rows.append({"prompt": prompt, "chosen": f" {good}", "rejected": f" {bad}"})
    write_jsonl(Path(path), rows)


def refresh(run: str, rows: str, *words: str) -> int:
    # Of eight objectives one finds drift in like rows by chance at alpha=0.01; other rows have p = 5e-5.
    keys = ["refresh.held_out=0.4", "refresh.bound=2", "refresh.alpha=0.001"]
    words = (*keys, f"data.cache_dir={Path.cwd() / 'cache'}", *words)
    return main(["refresh", run, f"data.sources=[{{path: {rows}}}]", *words])


def train(objective: str, *words: str) -> None:
    judged = objective == "kto"
    write("old.jsonl", OLD, 0, judged, 60)
    write("same.jsonl", OLD, 500, judged)
    write("new.jsonl", NEW, 1000, judged)
    assert main([*WORDS, f"objective={objective}", "run.dir=runs/mine", *words]) == 0


def entries(run: str = "mine") -> list[dict]:
    return json.loads(Path(f"runs/{run}.refresh/lineage.json").read_text())["refreshes"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with runs/mine, a finished run of DPO."""
    folder = tmp_path_factory.mktemp("parent")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        train("dpo", LORA)
    return folder


@pytest.fixture
def parent(folder, monkeypatch) -> None:
    """In the folder of runs/mine, without refreshes."""
    monkeypatch.chdir(folder)
    shutil.rmtree("runs/mine.refresh", ignore_errors=True)


def refreshed(capsys, noun: str) -> dict:
    """The entry of a refresh with new rows, which is promoted, after one with rows like the old ones."""
    assert refresh("runs/mine", "same.jsonl") == 10
    assert f"loss, mean over {noun}" in capsys.readouterr().out
    assert refresh("runs/mine", "new.jsonl") == 0
    assert "Promoted: run-2 serves now" in capsys.readouterr().out
    last = entries()[-1]
    assert last["data"][0]["documents"] == 36
    assert last["gate"]["new_loss"][1] < last["gate"]["new_loss"][0]
    return last


def test_pairs_like_the_old_ones_are_no_drift_and_others_are_learned_and_promoted(parent, capsys):
    last = refreshed(capsys, "pairs")
    # Both tests have one reference: before training the model was at ln 2, and it has learned the old pairs.
    assert last["drift"]["old_loss"] < 0.6
    assert last["gate"]["old_loss"][0] == pytest.approx(last["drift"]["old_loss"], rel=1e-4)
    shutil.move("runs/mine", "runs/away")
    try:
        assert refresh("runs/mine.refresh", "same.jsonl") == 2
    finally:
        shutil.move("runs/away", "runs/mine")
    assert "model that this run started from" in errors(capsys)


def errors(capsys) -> str:
    """What the last command wrote to stderr, in one line."""
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_model_that_has_not_moved_has_the_loss_of_the_old_model_and_is_rejected(parent):
    """Compared with its own start it would have a loss of ln 2."""
    assert refresh("runs/mine", "new.jsonl", "optimizer.lr=1e-9") == 11
    gate = entries()[-1]["gate"]
    for before, after in (gate["old_loss"], gate["new_loss"]):
        assert after == pytest.approx(before, rel=1e-4)
    assert gate["old_loss"][0] < 0.6


@pytest.mark.slow
def test_reference_is_the_adapter_that_the_first_run_continued(parent, capsys):
    """With a tiny rate the run does not leave its start, so each pair has a loss of ln 2 there, not by the base."""
    shutil.copytree("runs/mine/adapter", "start")
    words = [LORA, "objective=dpo", "model.adapter=start", "run.dir=runs/further", "optimizer.lr=1e-9"]
    assert main([*WORDS, *words]) == 0
    assert refresh("runs/further", "same.jsonl") == 10
    assert entries("further")[-1]["drift"]["old_loss"] == pytest.approx(math.log(2), abs=1e-4)
    shutil.rmtree("start")
    capsys.readouterr()
    assert refresh("runs/further", "new.jsonl") == 6
    assert "model.adapter=start: no such folder here" in errors(capsys)


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["simpo", "orpo", "reward", "kto", "ipo"])
def test_every_objective_is_refreshed(cwd, capsys, objective):
    train(objective, LORA)
    refreshed(capsys, "answers" if objective == "kto" else "pairs")
