"""A recipe's file: plain values only, each key with its line."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from support.recipes import refusal

from fxtune.cli.main import main
from fxtune.config.yaml_reader import read
from fxtune.errors import ConfigError

CASES = [
    ("a: [1\nb: 2\n", 2, "not YAML"),
    ("run: {seed: 1}\nrun: {seed: 2}\n", 2, "not YAML"),
    ("- a\n- b\n", 1, "a recipe is `key: value` lines"),
    ("just text", 1, "a recipe is `key: value` lines"),
    ("run:\n\tname: x\n", 2, "not YAML"),
]


@pytest.mark.parametrize(("text", "line", "message"), CASES)
def test_text_that_is_no_mapping_is_refused_with_its_line(tmp_path, text, line, message):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(f"{file}:{line}: ") + ".*" + re.escape(message)):
        read(file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: &x 1\n", "anchors"),
        ("a: {<<: {b: 1}}\n", "merge keys"),
        ("a: !!python/name:os.system \n", "tags"),
        ("a: " + "[" * 30 + "]" * 30, "levels deep"),
        ("a: " + "x" * 300_000, "bytes, and a recipe may have"),
    ],
)
def test_yaml_that_is_more_than_values_is_refused(tmp_path, text, message):
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read(tmp_path / "mine.yaml")


def test_each_key_has_its_line(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "# @package _global_\nrun:\n  name: x\ndata:\n  sources:\n    - path: a\n      on: b\n"
    )
    document = read(tmp_path / "mine.yaml")
    assert document.package == "_global_"
    assert document.lines["run", "name"] == 3
    assert document.lines["data", "sources", "0", "True"] == 7, "YAML reads a key `on` as true"
    assert document.where(("data", "sources", "0", "format", "x")).endswith("mine.yaml:6")


@pytest.mark.parametrize("kind", ["pipe", "endless", "folder"])
def test_recipe_that_is_no_regular_file_is_refused(kind, cwd, capsys):
    Path("recipes").mkdir()
    odd = Path("recipes/mine.yaml")
    {"pipe": lambda: os.mkfifo(odd), "endless": lambda: odd.symlink_to("/dev/zero"), "folder": odd.mkdir}[kind]()
    assert main(["recipes"]) == 0
    capsys.readouterr()
    for name in ("mine", "recipes/mine.yaml"):
        assert "there is no recipe" in refusal(f"+recipe={name}")
    with pytest.raises(ConfigError, match="not a regular file"):
        read(odd)
