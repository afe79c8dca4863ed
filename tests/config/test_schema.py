"""`fxtune schema`: every key of a recipe is in the JSON Schema, with its type, its range and its values."""

from __future__ import annotations

import json

import pytest

from fxtune.cli.main import main
from fxtune.config.introspection import all_keys
from fxtune.config.root import Config
from fxtune.config.schema import recipe_schema


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
    assert main(["schema", str(tmp_path / "schema.json")]) == 0
    assert json.loads((tmp_path / "schema.json").read_text()) == printed == recipe_schema()
