"""A program drives fxtune by its JSON alone, with the commands of AGENTS.md."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.documents import TEXTS, commands

from fxtune.cli.main import main

PAGE = TEXTS["AGENTS.md"]
WAY = [line for line in commands(PAGE) if " mine" in line or "=mine" in line]


class Program:
    """Gives commands in `folder`, as a user's process does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def give(self, command: str) -> tuple[int, dict]:
        """The exit code, and the JSON of a command of AGENTS.md."""
        line = re.sub(r"^fxtune\b", f"{sys.executable} -m fxtune", command)
        done = subprocess.run(line, shell=True, cwd=self.folder, capture_output=True, text=True, timeout=600)
        file = re.search(r"--json ([\w.]+)", command)
        return done.returncode, json.loads((self.folder / file[1]).read_text() if file else done.stdout)


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Program:
    folder = tmp_path_factory.mktemp("rows")
    orders = [(f"Order {count} {dish}", f"{dish}={count}") for dish in ("tea", "soup", "cake") for count in range(40)]
    turns = [[{"role": "user", "content": asked}, {"role": "assistant", "content": said}] for asked, said in orders]
    (folder / "rows.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in turns))
    (folder / "prompts.txt").write_text("Order 3 tea\nOrder 4 soup\n")
    return Program(folder)


def test_the_page_is_short_and_has_the_whole_way():
    assert len(PAGE.splitlines()) <= 120
    words = [line.split()[1] for line in WAY]
    assert words == ["new", "preview", "plan", "verify", "+recipe=mine", "eval", "chat", "export"]


@pytest.mark.slow
@pytest.mark.vital
def test_rows_become_a_model_that_answers(program):
    found = {}
    for command in WAY:
        code, answer = program.give(command)
        assert code == 0, answer
        assert "error" not in answer
        found[re.search(r"--json (\w+)", command)[1]] = answer
        for following in answer.get("next", []):
            assert re.sub(r" --json.*", "", following) in " ".join(WAY)
    assert Path(program.folder / found["new"]["path"]).is_file()
    assert found["preview"]["summary"]["supervised_tokens"] > 0
    assert found["plan"]["fits"]
    assert found["verify"]["acted"]
    train, evaluated = found["train"], found["eval"]
    result = json.loads((program.folder / train["folder"] / "result.json").read_text())
    assert result.pop("exports").keys() == {"vllm/adapter"}
    assert train["figures"] == result
    assert train["held_out"]["eval/loss"] == pytest.approx(evaluated["figures"]["eval/loss"], rel=1e-4)
    assert [said["prompt"] for said in found["chat"]["answers"]] == ["Order 3 tea", "Order 4 soup"]
    assert all(said["tuned"]["answer"] for said in found["chat"]["answers"])
    assert found["export"]["command"].startswith("vllm serve")
    assert (program.folder / found["export"]["folder"] / "adapter_config.json").is_file()
    (pipe,) = (line for line in PAGE.splitlines() if line.startswith("printf"))
    pipe = pipe.replace("fxtune", f"{sys.executable} -m fxtune").replace("| python ", f"| {sys.executable} ")
    said = subprocess.run(pipe, shell=True, cwd=program.folder, capture_output=True, text=True, timeout=600).stdout
    assert said.strip() == found["chat"]["answers"][0]["tuned"]["answer"]


def test_a_program_corrects_a_recipe_by_the_error(program, monkeypatch):
    monkeypatch.chdir(program.folder)
    recipe = program.folder / "recipes" / "wrong.yaml"
    recipe.parent.mkdir(exist_ok=True)
    recipe.write_text("# @package _global_\ndata:\n  sources: [{path: rows.jsonl}]\n  sequense_length: 128\n"
                      "model:\n  path: builtin:tiny\ntrain:\n  max_stepss: 2\n")  # fmt: skip
    command = ["preview", "+recipe=wrong", "--json", "found.json"]
    assert main(command) == 2
    answer = json.loads(Path("found.json").read_text())
    assert answer["error"]["code"] == "config"
    lines = recipe.read_text().splitlines()
    for mistake in (answer["error"], *answer["error"]["also"]):
        assert mistake["file"] == "recipes/wrong.yaml"
        wrong, right = (mistake[part].rpartition(".")[2] for part in ("key", "suggestion"))
        at = mistake["line"] - 1
        assert wrong in lines[at]
        lines[at] = lines[at].replace(wrong, right)
    recipe.write_text("\n".join(lines))
    assert main(command) == 0
    answer = json.loads(Path("found.json").read_text())
    assert "error" not in answer
    assert answer["summary"]["steps"] == 2


def test_a_pipe_gets_json_and_nothing_else(program):
    code, answer = program.give("fxtune help optimizer.lr --json")
    (key,) = answer["keys"]
    assert (code, key["default"], key["range"]) == (0, 2e-4, "above 0")
    assert "fxtune/optim/optimizer.py" in key["acts_in"]
    assert key["meaning"]
