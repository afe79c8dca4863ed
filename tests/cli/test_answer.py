"""--json: the parts of an error's message, what a command that fails or is stopped leaves, and the one file."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.cases import slow_but
from support.recipes import QUICK, write_recipe

from fxtune.cli import answer
from fxtune.cli import main as command
from fxtune.config.root import Config
from fxtune.errors import DataError, UserError

SHORT = [QUICK, "train.max_steps=2"]


def given(*argv: str) -> tuple[int, dict]:
    code = command.main([*argv, "--json", "found.json"])
    return code, json.loads(Path("found.json").read_text())


@pytest.mark.parametrize(
    ("message", "parts"),
    [
        ("recipes/a.yaml:7: unknown key `optimizer.lrr`; did you mean `optimizer.lr`?",
         ("optimizer.lrr", "recipes/a.yaml", 7, "did you mean `optimizer.lr`?", "optimizer.lr")),
        ("on the command line: unknown key `lrr`; did you mean `optimizer.lr`?",
         ("lrr", None, None, "did you mean `optimizer.lr`?", "optimizer.lr")),
        ("in the config: `train.epochs=0` must be above 0", ("train.epochs", None, None, None, None)),
        ("my rows/a b.jsonl:12: messages[0]: role 'x' is unknown; use user.",
         (None, "my rows/a b.jsonl", 12, "use user.", None)),
        ("data.jsonl: none of the 3 rows can be used; the first, data.jsonl:2: no text. Set the format.",
         (None, "data.jsonl", 2, "the first, data.jsonl:2: no text. Set the format.", None)),
        ("no.jsonl: there is no such file. Did you mean yes.jsonl?",
         (None, "no.jsonl", None, "Did you mean yes.jsonl?", "yes.jsonl")),
        ("data.sources.0.path: no.jsonl: there is no such file.",
         ("data.sources.0.path", "no.jsonl", None, None, None)),
        ("model.path=no/such: no such folder here. Check the network.",
         ("model.path", None, None, "Check the network.", None)),
        ("techniques.lora.r: too large. Set it to 8.", ("techniques.lora.r", None, None, "Set it to 8.", None)),
        ("objective=dpo needs pairs: set objective=kto", ("objective", None, None, "set objective=kto", None)),
        ("run.gpus=2, but torch sees no GPU here.", ("run.gpus", None, None, None, None)),
        ("config.yaml of runs/a/b.json cannot be read", (None, None, None, None, None)),
    ],
)  # fmt: skip
def test_parts_of_a_message(message, parts):
    found = answer.described(UserError(message), 2)
    assert (found["key"], found["file"], found["line"], found["change"], found["suggestion"]) == parts
    assert found["message"] == message
    assert found["also"] == []


def test_sections_are_those_of_a_config():
    assert set(answer.SECTIONS.split("|")) == set(Config.__dataclass_fields__)


def test_each_mistake_is_an_object_and_options_are_mistakes_too(cwd):
    write_recipe("# @package _global_\noptimizer:\n  lrr: 1\ntrain:\n  epochs: many\n")
    code, found = given("preview", "+recipe=mine")
    first, second = found["error"], *found["error"]["also"]
    assert (code, first["exit_code"], first["code"]) == (2, 2, "config")
    assert (first["key"], first["file"], first["line"]) == ("optimizer.lrr", "recipes/mine.yaml", 3)
    assert (second["key"], second["line"]) == ("train.epochs", 5)
    assert given("plan", QUICK, "--gpux", "3")[1]["error"]["code"] == "config"
    assert command.main(["plan", QUICK, "--json", "--gpus", "3"]) == 2


def test_a_bug_an_error_and_a_success_leave_their_own_answer(cwd, trained, monkeypatch, capsys):
    Path("found.json").write_text('{"old": 1}')
    assert given(QUICK) == (0, {})

    def fail(error: BaseException) -> dict:
        def run(config):
            answer.ANSWER.put({"so": "far"})
            raise error

        monkeypatch.setattr(sys.modules["fxtune.cli.stand_in_train"], "run", run)
        try:
            code = command.main([QUICK, "--json", "found.json"])
        except ZeroDivisionError:
            code = 1
        found = json.loads(Path("found.json").read_text())
        assert (found["so"], found["error"]["exit_code"]) == ("far", code)
        return found["error"]

    assert fail(DataError("rows.jsonl:3: no text"))["line"] == 3
    assert fail(ZeroDivisionError("of nothing"))["code"] == "bug"
    assert fail(KeyboardInterrupt())["code"] == "stopped"


def test_a_multirun_has_a_list_of_its_runs(cwd, trained, monkeypatch):
    def run(config):
        if config.run.seed == 2:
            raise DataError("rows.jsonl:3: no text")
        Path(config.run.dir).mkdir(parents=True)
        return {"train/loss": 1.0, "eval/loss": float("nan")}

    monkeypatch.setattr(sys.modules["fxtune.cli.stand_in_train"], "run", run)
    code, found = given("-m", QUICK, "run.seed=1,2")
    good, bad = found["runs"]
    assert (code, found["error"]["code"]) == (3, "data")
    assert good["figures"] == {"train/loss": 1.0, "eval/loss": None}
    assert "rows.jsonl:3" in bad["error"]


@pytest.mark.parametrize(
    ("number", "code"), slow_but([(signal.SIGTERM, 75), (signal.SIGINT, 130)], (signal.SIGTERM, 75))
)
def test_a_stopped_run_says_how_to_go_on(cwd, number, code):
    quick = ["data.questions.path=null", "run.report=false", "train.log_every=1", "run.dir=run"]
    words = [QUICK, "train.epochs=100", *quick, "--json", "found.json"]
    process = subprocess.Popen([sys.executable, "-m", "fxtune", *words], stdout=subprocess.DEVNULL)
    try:
        while process.poll() is None and not Path("run/metrics.jsonl").is_file():
            time.sleep(0.1)
        process.send_signal(number)
        assert process.wait(timeout=600) == code
    finally:
        process.kill()
    error = json.loads(Path("found.json").read_text())["error"]
    assert (error["code"], error["exit_code"]) == ("stopped", code)
    assert error["change"]


@pytest.mark.slow
def test_two_ranks_leave_one_answer(cwd):
    two = ["run.gpus=2", "run.device=cpu", "train.global_batch_size=2", "train.micro_batch_size=1"]
    Path("bad.jsonl").write_text('{"messages": [{"role": "nobody", "content": "a"}]}\n')
    for words, code in (([], 0), (["data.sources=[{path: bad.jsonl}]", "run.name=bad"], 3)):
        line = [sys.executable, "-m", "fxtune", *SHORT, *two, *words, "--json", "found.json"]
        assert subprocess.run(line, capture_output=True, timeout=600).returncode == code
        found = json.loads(Path("found.json").read_text())
        assert ("error" in found) == bool(code)
        assert found["error"]["file"] == "bad.jsonl" if code else found["finished"]
