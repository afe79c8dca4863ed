"""`fxtune schema`: every key of a recipe is in the JSON Schema, with its type, its range and its values."""

from __future__ import annotations

import json

import pytest

from fxtune.cli.main import main
from fxtune.cli.schema import recipe_schema
from fxtune.config import discovery
from fxtune.config.introspection import all_keys
from fxtune.config.root import Config


def at(schema, key):
    """The part of the schema for a key."""
    for name in key.split("."):
        options = [schema, *schema.get("anyOf", ())]
        found = [part["items"] if name.isdigit() else part["properties"].get(name) for part in options
                 if ("items" if name.isdigit() else "properties") in part]  # fmt: skip
        schema = next(part for part in found if part is not None)
    return schema


@pytest.mark.parametrize("key", [*all_keys(Config)])
def test_each_key_is_in_the_schema(key):
    assert isinstance(at(recipe_schema(), key), dict)


@pytest.mark.parametrize(
    ("key", "part"),
    [
        ("optimizer.lr", {"type": "number", "exclusiveMinimum": 0}),
        ("train.micro_batch_size", {"type": "integer", "minimum": 1}),
        ("data.on_long", {"enum": ["split", "truncate", "drop", "error"]}),
        ("model.revision", {"type": "null"}),
        ("optimizer.lr", {"enum": ["auto"]}),
    ],
)
def test_a_key_has_its_type_its_range_and_its_values(key, part):
    assert part in at(recipe_schema(), key)["anyOf"]


def test_the_command_prints_it_or_writes_a_file(capsys, tmp_path):
    assert main(["schema"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert main(["schema", "--json", str(tmp_path / "schema.json")]) == 0
    assert capsys.readouterr().out == ""
    assert json.loads((tmp_path / "schema.json").read_text()) == printed == recipe_schema()


SHIPPED = discovery.shipped("recipes")


@pytest.mark.parametrize("recipe", sorted(SHIPPED.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_recipe_that_ships_names_the_schema(recipe):
    assert discovery.SCHEMA_LINE in recipe.read_text().splitlines()


def test_the_schema_that_ships_is_the_one_of_this_version():
    """`python scripts/make/keys.py` writes it."""
    assert json.loads((SHIPPED / discovery.SCHEMA).read_text()) == recipe_schema()


AXOLOTL = "base_model: builtin:tiny\nadapter: lora\ndatasets: [{path: rows.jsonl, type: chat_template}]\n"


@pytest.mark.parametrize(
    "words",
    [
        ["recipes", "copy", "quickstart", "recipes/mine.yaml"],
        ["recipes", "copy", "./plain.yaml", "recipes/mine.yaml"],
        ["new", "mine", "--data", "rows.jsonl", "--model", "builtin:tiny"],
        ["import", "axolotl.yaml", "mine"],
    ],
    ids=lambda words: words[0],
)
def test_an_editor_finds_the_schema_of_a_recipe_that_fxtune_writes(words, cwd):
    turns = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    (cwd / "rows.jsonl").write_text("".join(json.dumps({"messages": turns, "id": n}) + "\n" for n in range(60)))
    (cwd / "plain.yaml").write_text("# @package _global_\nrun: {}\n")
    (cwd / "axolotl.yaml").write_text(AXOLOTL)
    assert main(words) == 0
    (line,) = (line for line in (cwd / "recipes" / "mine.yaml").read_text().splitlines() if "$schema" in line)
    assert line == discovery.SCHEMA_LINE
    schema = cwd / "recipes" / line.partition("$schema=")[2]
    assert json.loads(schema.read_text()) == recipe_schema()
    assert not discovery.recipes()["mine"].title.startswith("yaml-language-server")
