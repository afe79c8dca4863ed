"""Every command of README.md and docs/ runs to its end, as a user gives it.

One folder is prepared by the first commands of the README. Each command then runs in a copy of it, shortened where it
would take minutes. test_docs.py composes the commands that cannot run here.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.documents import ALL, EXAMPLES
from support.harness import user_environment, write_chats

pytestmark = pytest.mark.slow

NEEDS = {
    "the weights of a model on the hub, and a GPU": (
        r"fxtune (-m )?\+recipe=(llama|qwen|gpt_oss|distill_on_policy)",
        r"fxtune bench \+recipe=llama_lora",
        r"fxtune tune \+recipe=llama_lora",
    ),
    "the tokenizer of a model on the hub": (r"fxtune new support .*--(gpu|model)",),
    "a config of another tool (tests/cli/test_import_config.py)": (r"fxtune import ",),
    "prompts or questions beside the recipe (tests/cli/test_programs.py)": (r"fxtune (chat|eval) mine --json",),
    "the config of a model on the hub": (r"fxtune plan \+recipe=llama_lora",),
    "lm-eval and its data sets": (r"fxtune eval quickstart --tasks", r"fxtune \+recipe=quickstart 'eval\.tasks"),
    "llama.cpp (tests/cli/test_export.py)": (r"fxtune export .*--to (gguf|ollama)",),
    "an account": (r"fxtune push ",),
    "the name of a run in place of RUN": (r"fxtune (eval|merge|export) RUN",),
}
"""What a command needs that a test does not have, and the commands by the beginning of their line."""
SHORTER = {
    "train": "train.max_steps=4 data.questions.limit=4",
    "eval": "data.questions.limit=4",
    "tune": "--axes=compile --steps=2",
    "sweep": "train.max_steps=4 data.questions.limit=4 --trials=2",
    "bench": "--steps=2 --warm-up=2",
    "lr": "--steps=20",
}
"""Words that make a command short, by its name."""
FIRST = {
    "fxtune preview rl_quickstart": "fxtune +recipe=rl_quickstart train.max_steps=1",
    "fxtune refresh quickstart 'data.sources=[{path: new.jsonl}]'": (
        "fxtune +recipe=quickstart data.eval_fraction=0.05 train.max_steps=4 data.questions.limit=4"
    ),
    "fxtune +recipe=quickstart run.dir=runs/mine schedule.name=wsd train.epochs=4": (
        "fxtune +recipe=quickstart run.dir=runs/mine schedule.name=wsd train.epochs=2 train.max_steps=3"
    ),
}
"""The command that a page gives before another one."""
CODES = {"refresh": (0, 10, 11)}
"""Exit codes that say how a command has decided (docs/refresh.md)."""


def needs(line: str) -> str:
    """What this command needs that a test does not have; empty if it can run."""
    return next((what for what, lines in NEEDS.items() if any(re.match(one, line) for one in lines)), "")


RUNNABLE = [line for line in ALL if not needs(line)]


def run(forks, line: str, folder: Path) -> tuple[int, str]:
    """The exit code and the output of a command line in `folder`. It is forked, which saves the imports, unless it
    reads from a pipe."""
    words, log = shlex.split(line)[1:], folder / "log.txt"
    if words[0] == "chat":
        with log.open("w") as out:
            code = subprocess.run(
                [sys.executable, "-m", "fxtune", *words],
                cwd=folder,
                input="Two large pizzas for Ann, please.\n",
                stdout=out,
                stderr=out,
                text=True,
                timeout=900,
                env=user_environment(),
            ).returncode
    else:
        log.unlink(missing_ok=True)
        code = forks.start(words, folder).wait(900)
    return code, log.read_text()


def shortened(line: str) -> str:
    """The command with the words of SHORTER, unless it only prints a config or reads a run."""
    words = shlex.split(line)[1:]
    name = words[0] if words[0].isalpha() else "train"
    return line if "--cfg" in words else f"{line} {SHORTER.get(name, '')}"


@pytest.fixture(scope="module")
def prepared(forks, tmp_path_factory) -> Path:
    """A folder with the runs, plugins and files that the commands name."""
    folder = tmp_path_factory.mktemp("prepared")
    for name in ("my", "rows", "chats", "replay"):
        write_chats(folder / f"{name}.jsonl", rows=120, seed=2)
    (folder / "odd.csv").write_text("Frage,Antwort\n" + "".join(f"Order {row}?,On its way.\n" for row in range(9)))
    for line in (
        "fxtune new mine --data my.jsonl",
        "fxtune +recipe=mine train.max_steps=2 run.dir=runs/mine-1",
        "fxtune +recipe=quickstart",
        "fxtune +recipe=quickstart optimizer.lr=1e-3 train.max_steps=4 data.questions.limit=4",
        "fxtune +recipe=quickstart optimizer.lr=2e-3 train.max_steps=4 data.questions.limit=4",
    ):
        code, said = run(forks, line, folder)
        assert code == 0, said
    shutil.rmtree(folder / "recipes")  # the first of these commands is tried below
    shutil.copytree(folder / "runs" / "quickstart" / "adapter", folder / "downloads" / "lamps")
    for name, text in EXAMPLES.items():
        (folder / name).write_text(text)
    write_chats(folder / "new.jsonl", seed=1)
    rows = [
        {"question": f"Where is order {row}?", "replies": [{"by": "agent", "text": "On its way."}]} for row in range(9)
    ]
    (folder / "tickets.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ranked = [
        {"query": f"Order {row}?", "candidates": ["On its way.", "No."], "relevance": [1, 0]} for row in range(64)
    ]
    (folder / "ranked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ranked))
    return folder


def test_each_entry_of_the_tables_is_about_a_command():
    for line in (one for lines in NEEDS.values() for one in lines):
        assert [command for command in ALL if re.match(line, command)], line
    assert set(FIRST) <= set(RUNNABLE)


@pytest.mark.parametrize("line", RUNNABLE)
def test_every_command_runs_to_its_end(line, forks, prepared, tmp_path):
    folder = tmp_path / "here"
    shutil.copytree(prepared, folder, symlinks=True)
    if line in FIRST:
        code, said = run(forks, FIRST[line], folder)
        assert code == 0, said
    code, said = run(forks, shortened(line), folder)
    assert code in CODES.get(shlex.split(line)[1], (0,)), said
    assert "Traceback" not in said
