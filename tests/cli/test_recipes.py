"""`fxtune recipes`: the list, and a copy to edit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.disks import files_of_at_most

from fxtune.cli.main import main
from fxtune.config import discovery
from fxtune.config.compose import load

SHIPPED = sorted(path.stem for path in discovery.shipped("recipes").glob("*.yaml"))


def test_list_names_every_recipe_with_its_first_line(cwd, capsys):
    (cwd / "recipes").mkdir()
    (cwd / "recipes" / "mine.yaml").write_text("# @package _global_\n# what mine does\nrun: {}\n")
    (cwd / "recipes" / "quickstart.yaml").write_text("run: {}\n")
    assert main(["recipes"]) == 0
    text = capsys.readouterr().out
    assert re.search(
        r"in recipes/\n  mine +what mine does\n  quickstart +\(no header line\)\n\nshipped with fxtune", text
    )
    for name in SHIPPED:
        if name != "quickstart":
            assert re.search(rf"^  {name} +{re.escape(discovery.recipes()[name].title)}$", text, re.MULTILINE)


def test_copied_recipe_composes_and_copy_never_overwrites(cwd, capsys):
    assert main(["recipes", "copy", "quickstart", "recipes/mine.yaml"]) == 0
    assert "fxtune +recipe=mine" in capsys.readouterr().out
    mine, original = load(["+recipe=mine"]), load(["+recipe=quickstart"])
    assert mine.run.name == "mine"
    mine.run.name = original.run.name
    assert mine == original

    Path("recipes/mine.yaml").write_text("edited")
    assert main(["recipes", "copy", "quickstart", "recipes/mine.yaml"]) == 2
    assert "exists already" in capsys.readouterr().err
    assert Path("recipes/mine.yaml").read_text() == "edited"

    assert main(["recipes", "copy", "quickstart", "here.yaml"]) == 0
    assert "fxtune +recipe=./here.yaml" in capsys.readouterr().out
    assert load(["+recipe=./here.yaml"]).run.name == "here"
    assert main(["recipes", "copy", "qickstart", "other.yaml"]) == 2
    assert "did you mean `quickstart`" in capsys.readouterr().err
    assert main(["recipes", "copy", "quickstart", "other.txt"]) == 2
    assert not Path("other.yaml").exists()
    assert main(["recipes", "copy", "quickstart", "recipes"]) == 0, "in a folder, the copy keeps the recipe's name"
    assert Path("recipes/quickstart.yaml").exists()


@pytest.mark.parametrize("size", [100, 20_000])  # no room for the recipe; no room for the schema beside it
def test_a_copy_that_a_full_disk_breaks_off_is_not_in_the_way_of_the_next(cwd, capsys, size):
    command = ["recipes", "copy", "quickstart", "recipes/mine.yaml"]
    with files_of_at_most(size):
        assert main(command) == 6
    assert "recipes/mine.yaml cannot be written" in capsys.readouterr().err
    assert main(command) == 0
    assert load(["+recipe=mine"]) == load(["+recipe=quickstart", "run.name=mine"])
