"""The documents are correct: their commands compose, and their paths, make targets and config keys exist."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import pytest
from support.documents import ALL, EXAMPLES, README, ROOT, TEXTS

from fxtune import plugins
from fxtune.cli import main as command
from fxtune.config import compose
from fxtune.config.introspection import all_keys
from fxtune.tuning import sweep_space


def test_documents_contain_commands():
    assert len(ALL) >= 6


@pytest.mark.parametrize("line", ALL)
def test_every_command_in_the_documents_composes(line, cwd, monkeypatch):
    words = shlex.split(line)[1:]
    used = [plugin_of_page(name, cwd) for option, name in pairwise(words) if option == "--plugin" and name in EXAMPLES]
    monkeypatch.chdir(ROOT)
    with plugins.files_used(used):
        compose_command(line, [text for text in words if text != "--plugin" and text not in EXAMPLES])


def plugin_of_page(name: str, folder: Path) -> Path:
    (folder / name).write_text(EXAMPLES[name])
    return folder / name


def compose_command(line: str, words: list[str]) -> None:
    word = words.pop(0) if words and words[0] in command.COMMANDS else "train"
    assert word in command.COMMANDS
    words = [text for text in words if text not in ("-m", "--cfg", "job")]
    known = command.COMMANDS[word]
    if known.positional_only:
        return
    alone = known.positional or known.config_optional
    if not alone or any("=" in text for text in words):
        swept = [text for text in words if text.startswith(sweep_space.PREFIX)]
        assert bool(swept) == (word == "sweep")
        sweep_space.parse(swept)
        chosen = compose.prepare([text for text in words if "=" in text and text not in swept], multirun="-m" in line)
        assert chosen
        compose.check_jobs(chosen)


def test_every_path_in_the_documents_exists():
    for name, text in TEXTS.items():
        for path in re.findall(r"`((?:fxtune|configs|recipes|scripts|tests)/[\w./-]*\w/?)`", text):
            if "NAME" not in path and not path.endswith("mine.yaml"):
                assert (ROOT / path).exists(), f"{name} names {path}"


def files_of_faults() -> dict[str, Path]:
    """The test files that the table of faults.md names."""
    lines = [line for line in TEXTS["faults.md"].partition("\n## ")[0].splitlines() if line.startswith("| ")]
    table = [line.strip("| ").split(" | ") for line in lines[1:]]
    assert len(table) > 20
    names = {name for row in table for name in row[-1].split(", ")}
    return {name: next((ROOT / "tests").glob(f"faults/{name}"), ROOT / "tests" / name) for name in names}


def test_every_fault_of_the_table_has_its_tests():
    assert [name for name, path in files_of_faults().items() if not path.is_file()] == []


@pytest.mark.slow
def test_every_test_of_the_table_of_faults_runs():
    files = files_of_faults()
    runs = runnable_tests(files.values())
    assert [name for name, path in files.items() if not runs.get(str(path))] == []


def test_every_report_that_was_tried_has_its_tests():
    rows = [
        line for line in TEXTS["tried_reports.md"].partition("\n## Not covered")[0].splitlines() if "](https:" in line
    ]
    assert len(rows) > 90
    for row in rows:
        tests = re.findall(r"`([\w/]+\.py)::(test_\w+)`", row.rpartition(" | ")[2])
        assert tests, row
        for file, function in tests:
            assert f"def {function}(" in (ROOT / "tests" / file).read_text(), f"{file}::{function}"


COLLECT = """
import json, sys
import pytest

runs = {}

class Plugin:
    def pytest_itemcollected(self, item):
        skipped = any(mark.name == "skip" or mark.args[:1] == (True,) for mark in item.iter_markers())
        runs[str(item.path)] = runs.get(str(item.path), 0) + (not skipped)

pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", *sys.argv[1:]], plugins=[Plugin()])
print(json.dumps(runs))
"""


def runnable_tests(files: Iterable[Path]) -> dict[str, int]:
    """How many tests pytest collects from each file, without those that are skipped on any machine."""
    argv = [sys.executable, "-c", COLLECT, *map(str, files)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=600, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_every_make_target_in_the_documents_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for name, text in TEXTS.items():
        for target in re.findall(r"`make ([a-z-]+)`", text) + re.findall(r"^make ([a-z-]+)", text, re.MULTILINE):
            assert target in targets, f"{name} names `make {target}`"


def test_every_config_key_in_the_readme_exists():
    keys = set(all_keys(compose.Config))
    groups = "run|model|data|train|optimizer|schedule|techniques|parallel|loader|checkpoint|tracking"
    found = re.findall(rf"`((?:{groups})\.[a-z_.0-9]+)[`=]", README + TEXTS["recipes.md"])
    assert len(found) >= 5
    for key in found:
        assert re.sub(r"\.\d+", ".0", key) in keys, f"the README or docs/recipes.md names {key}"


def test_readme_is_short():
    assert len(README.splitlines()) <= 150
