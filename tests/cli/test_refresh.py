"""`fxtune refresh RUN`: no drift, drift, promotion, rejection, kills between its stages, and bad input."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from pathlib import Path
from typing import NoReturn

import pytest
from support.runs import history

from fxtune.checkpoint import lineage as lineages
from fxtune.cli.main import main
from fxtune.outputs import document_losses, refresh
from fxtune.training import trainer

LIKE = ["red", "lamp", "table", "from", "Oslo", "order", "seven", "small", "chair", "please", "blue", "four"]
UNLIKE = ["σώμα", "πῦρ", "γῆ", "φῶς"]


def write(path: str, words: list[str], seed: int, rows: int = 60) -> list[str]:
    draw = random.Random(seed)
    with open(path, "w", encoding="utf-8") as out:
        for _ in range(rows):
            turns = [
                {"role": role, "content": " ".join(draw.choices(words, k=draw.randint(4, 9)))}
                for role in ("user", "assistant")
            ]
            out.write(json.dumps({"messages": turns}) + "\n")
    cache = f"data.cache_dir={Path.cwd() / 'cache'}"
    return ["refresh", "runs/mine", f"data.sources=[{{path: {path}}}]", cache, "refresh.held_out=0.4"]


@pytest.fixture
def parent(narrow, cwd) -> Path:
    """A finished run in runs/mine of rows of LIKE, with held-out ones."""
    write("old.jsonl", LIKE, 0, 80)
    narrow.data.sources[0].path, narrow.data.eval_fraction, narrow.run.dir = "old.jsonl", 0.3, "runs/mine"
    narrow.data.sequence_length, narrow.optimizer.lr, narrow.train.max_steps = 128, 1e-2, 8
    trainer.run(narrow)
    return cwd / "runs" / "mine"


def interrupt(*_: object) -> NoReturn:
    """Stands for Ctrl-C. A real SIGINT would not come in a suite that a script started in the background."""
    raise KeyboardInterrupt


def entries() -> list[dict]:
    return json.loads(Path("runs/mine.refresh/lineage.json").read_text())["refreshes"]


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(file): (file.stat().st_mtime_ns, file.stat().st_size) for file in folder.rglob("*") if file.is_file()}


@pytest.mark.vital
def test_rows_like_the_old_ones_are_no_drift_and_others_are_learned_and_promoted(parent, capsys):
    before = snapshot(parent)
    current = Path("runs/mine.refresh/current")
    same = write("same.jsonl", LIKE, 5)
    assert main(same) == 10
    assert "No drift" in capsys.readouterr().out
    assert [entry["decision"] for entry in entries()] == ["no drift"]
    assert main(same) == 10
    assert "has tested these rows already" in capsys.readouterr().out
    assert current.resolve() == parent
    command = [*write("new.jsonl", UNLIKE, 6), "refresh.bound=2"]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "Greek" in shown
    assert "Promoted: run-2 serves now" in shown
    assert current.resolve().name == "run-2"
    assert (current / "adapter" / "adapter_model.safetensors").exists()
    last = entries()[-1]
    assert last["decision"] == "promoted"
    assert last["parent"] == "../mine"
    assert last["gate"]["new_loss"][1] < last["gate"]["new_loss"][0]
    assert snapshot(parent) == before
    assert main(command) == 0
    assert "was promoted with these rows already" in capsys.readouterr().out
    rows = Path("new.jsonl").read_text().splitlines(keepends=True)
    Path("turned.jsonl").write_text("".join(reversed(rows)))
    assert main([*command[:2], "data.sources=[{path: turned.jsonl}]"]) == 10, "no row is new"
    assert len(entries()) == 2
    current.unlink()
    current.symlink_to("../mine")  # back to the old run
    assert main(command) == 12
    assert "does not serve any more" in capsys.readouterr().out
    assert entries()[-1]["decision"] == "promoted"
    assert current.resolve() == parent


def test_rows_that_an_earlier_refresh_tested_are_not_tested_again(parent, capsys):
    files = [write(f"{seed}.jsonl", LIKE, seed) for seed in (5, 7)]
    for command in (*files, *files):
        assert main(command) == 10
    assert [entry["number"] for entry in entries()] == [1, 2]
    assert "Refresh 1 has tested these rows already" in capsys.readouterr().out


@pytest.mark.slow
def test_rejected_run_replaces_nothing(parent, capsys, tmp_path):
    command = [*write("new.jsonl", UNLIKE, 6), "optimizer.lr=1e-9", "--json", str(tmp_path / "entry.json")]
    for _ in range(2):  # the second time it says so without training again
        assert main(command) == 11
        assert "not shown to be better on the new rows" in capsys.readouterr().out
        assert Path("runs/mine.refresh/current").resolve() == parent
    assert json.loads((tmp_path / "entry.json").read_text()) == entries()[0]


@pytest.mark.slow
def test_run_that_has_forgotten_general_text_replaces_nothing(parent, capsys):
    general = ["data.general=[{path: old.jsonl}]", "refresh.replay=0.02", "refresh.bound=9", "optimizer.lr=0.03"]
    command = [*write("new.jsonl", UNLIKE, 6), *general, "refresh.forgotten=0"]
    assert main(command) == 11
    assert "its loss on general text rose by more than refresh.forgotten=0" in capsys.readouterr().out
    gate = entries()[-1]["gate"]
    assert gate["forgot"]
    assert gate["general_loss"][0] < gate["general_loss"][1]
    assert Path("runs/mine.refresh/current").resolve() == parent


@pytest.mark.slow
@pytest.mark.parametrize("place", ["drift", "prepare", "train", "judge", "serve"])
def test_killed_command_goes_on_with_the_same_result(parent, place, monkeypatch):
    """A kill after each stage, before its result is used: no stage that was saved is repeated."""
    command, calls = [*write("new.jsonl", UNLIKE, 6), "refresh.bound=2"], []
    owner, name = {
        "drift": (refresh._Refresh, "_prepare"),
        "prepare": (refresh._Refresh, "_train"),
        "train": (refresh._Refresh, "_judge"),
        "judge": (lineages.Lineage, "serve"),
        "serve": (lineages.Lineage, "save"),
    }[place]
    own = getattr(owner, name)

    def kill(self, *arguments):
        calls.append(name)
        if place == "judge":
            if arguments[0].name == "run-1":
                raise KeyboardInterrupt
        elif place != "serve" or self.serving.name == "run-1":
            raise KeyboardInterrupt
        return own(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, kill)
        assert main(command) == 130
    assert Path("runs/mine.refresh/current").resolve().name == ("run-1" if place == "serve" else "mine")
    measured = []
    measure = document_losses.document_losses

    def counted(*arguments, **named):
        measured.append(1)
        return measure(*arguments, **named)

    monkeypatch.setattr(document_losses, "document_losses", counted)
    assert main(command) == 0
    assert len(entries()) == 1
    assert entries()[0]["decision"] == "promoted"
    assert len(measured) == {"drift": 4, "prepare": 4, "train": 4, "judge": 0, "serve": 0}[place]
    assert Path("runs/mine.refresh/current").resolve().name == "run-1"


@pytest.mark.slow
def test_growing_file_has_only_its_new_rows_learned_and_the_refreshed_run_is_the_next_parent(parent, capsys):
    old = Path("old.jsonl").read_text()
    command = write("new.jsonl", UNLIKE, 6)
    Path("both.jsonl").write_text(old + Path("new.jsonl").read_text())
    command[2] = "data.sources=[{path: both.jsonl}]"
    assert main([*command, "refresh.bound=2"]) == 0
    assert "80 documents of data.sources are known" in capsys.readouterr().out
    assert Path("runs/mine.refresh/run-1.rows-0.jsonl").read_text().count("\n") == 60
    # The file is overwritten with other rows of the new kind, which are no drift from the run that learned this kind.
    for name in ("both.jsonl", "new.jsonl"):
        os.remove(name)
    assert main(write("new.jsonl", UNLIKE, 7)) == 10
    assert entries()[-1]["parent"] == "run-1"


@pytest.mark.slow
def test_whole_model_goes_on_from_its_exported_weights(narrow, parent, capsys, monkeypatch):
    whole = parent.with_name("whole")
    narrow.run.dir, narrow.techniques.lora.enabled, narrow.train.max_steps = str(whole), False, 20
    trainer.run(narrow)
    before, current = snapshot(whole), Path("runs/whole.refresh/current")

    def command(path: str, words: list[str], seed: int) -> list[str]:
        _, _, *rest = write(path, words, seed)
        return ["refresh", "runs/whole", *rest, "refresh.bound=2", "refresh.forgotten=null"]

    assert main(command("same.jsonl", LIKE, 5)) == 10
    assert current.resolve() == whole
    new = command("new.jsonl", UNLIKE, 6)
    assert main([*new, "techniques.lora.enabled=true"]) == 2
    assert "runs/whole has exported its model" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(refresh._Refresh, "_judge", interrupt)
        assert main(new) == 130
    assert current.resolve() == whole
    assert main(new) == 0
    assert current.resolve().name == "run-2"
    assert not (current / "adapter").exists()
    last = json.loads(Path("runs/whole.refresh/lineage.json").read_text())["refreshes"][-1]
    weights = (whole / "model" / "model.safetensors").read_bytes()
    assert (last["decision"], last["parent"], last["model"]) == (
        "promoted",
        "../whole",
        hashlib.sha256(weights).hexdigest(),
    )
    first, fresh = (next(row["train/loss"] for row in history(run) if "train/loss" in row) for run in (current, whole))
    assert first < fresh, "it begins with what the run had learned"
    assert snapshot(whole) == before
    shutil.rmtree(whole / "checkpoints", ignore_errors=True)
    assert main(command("more.jsonl", UNLIKE, 7)) == 10, "the next one begins with the model that serves"


def test_bad_input_is_one_message_and_leaves_nothing(parent, capsys, monkeypatch):
    command = write("new.jsonl", UNLIKE, 6)

    def refused(code: int, said: str, *words: str) -> None:
        assert main([*command, *words] if words and "=" in words[0] else list(words) or command) == code
        error = capsys.readouterr().err
        assert said in error
        assert "Traceback" not in error
        assert error.count("fxtune: ") == 1

    refused(2, "needs the new rows", "refresh", "runs/mine")
    refused(2, "there is no run `runs/gone`", "refresh", "runs/gone", command[2])
    refused(2, "unknown key `refresh.replai`", "refresh.replai=0.1")
    refused(2, "`data.eval_fraction` cannot be set here", "data.eval_fraction=0.1")
    refused(2, "`train.epochs` cannot be set here: refresh.epochs", "train.epochs=1")
    refused(2, "`run.export` cannot be set here: a refresh exports its best", "run.export=last")
    Path("text.jsonl").write_text('{"text": "a b c"}\n' * 3)
    command[2] = "data.sources=[{path: text.jsonl}]"
    refused(3, "has rows of format text, and runs/mine was trained on chats")
    Path("empty.jsonl").write_text("")
    command[2] = "data.sources=[{path: empty.jsonl}]"
    refused(3, "is empty")
    write("few.jsonl", UNLIKE, 3, rows=6)
    command[2] = "data.sources=[{path: few.jsonl}]"
    refused(3, "Wait for more rows")
    command[2] = "data.sources=[{path: new.jsonl}]"
    os.rename("old.jsonl", "away.jsonl")
    refused(3, "old.jsonl: there is no such file")
    write("old.jsonl", LIKE, 99)
    refused(2, "The rows that runs/mine was trained on have changed")
    os.rename("away.jsonl", "old.jsonl")
    refused(2, "`techniques.lora.enabled` cannot be set here", "techniques.lora.enabled=false")
    os.rename(parent / "adapter", parent / "model")
    refused(2, "runs/mine/adapter is gone")
    os.rename(parent / "model", parent / "adapter")
    os.rename(parent / "result.json", parent / "kept.json")
    refused(2, "runs/mine is not finished")
    os.rename(parent / "kept.json", parent / "result.json")
    text = (parent / "config.yaml").read_text()
    (parent / "config.yaml").write_text(text.replace("eval_fraction: 0.3", "eval_fraction: 0.0"))
    refused(2, "held no rows out")
    assert not Path("runs/mine.refresh").exists()


def test_lineage_in_use_or_damaged_and_a_run_that_does_not_serve(parent, capsys):
    command = write("same.jsonl", LIKE, 5)
    held = lineages.open_lineage(Path("runs/mine"))
    assert main(command) == 6
    assert "is in use by another refresh" in capsys.readouterr().err
    held.save()
    (parent.parent / "mine.refresh" / "run-7").mkdir()
    held.release()
    for run in ("runs/mine.refresh", "runs/mine.refresh/current"):
        assert main(["refresh", run, *command[2:]]) == 10
    assert main(["refresh", "runs/mine.refresh/run-7", *command[2:]]) == 2
    assert "run-7 does not serve" in capsys.readouterr().err
    Path("runs/mine.refresh/lineage.json").write_text("{}")
    assert main(command) == 6
    assert "lineage.json cannot be used" in capsys.readouterr().err
