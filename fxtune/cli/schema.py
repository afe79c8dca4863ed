"""`fxtune schema`: the keys of a recipe as JSON Schema (draft 2020-12), for editors and programs.

    fxtune schema                                      # print it
    fxtune schema --json recipes/fxtune.schema.json    # write it

An editor finds the schema by the line `# yaml-language-server: $schema=fxtune.schema.json` in a recipe. `fxtune new`,
`import` and `recipes copy` write this line, and the schema beside the recipe.
"""

from __future__ import annotations

from typing import Any

from fxtune.cli.answer import ANSWER
from fxtune.config import discovery
from fxtune.config.introspection import Slot
from fxtune.config.root import Config
from fxtune.distributed.files import as_json

_TYPES = {int: "integer", float: "number", bool: "boolean", str: "string"}
_LIMITS = {"min": "minimum", "above": "exclusiveMinimum", "max": "maximum", "below": "exclusiveMaximum"}
POINTER = {"type": "string", "pattern": r"\$\{"}
"""A value that names another key: `${optimizer.lr}`."""


def run() -> None:
    schema = recipe_schema()
    ANSWER.put(schema)
    if ANSWER.file is None:
        print(as_json(schema), end="")


def recipe_schema() -> dict[str, Any]:
    found = _of(Slot(Config))
    groups = {"type": "array", "items": {"anyOf": [{"type": "string"}, {"type": "object"}]}}
    found["properties"] = {
        "defaults": {**groups, "description": "recipes and config groups that this one builds on"}
    } | (found["properties"])
    names = ", ".join(f"{group} ({', '.join(options)})" for group, options in discovery.groups().items())
    found["properties"]["defaults"]["description"] += f": {names}"
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "A recipe of fxtune", **found}


def _of(slot: Slot) -> dict[str, Any]:
    if slot.fields:
        properties = {name: _of(below) for name, below in slot.fields.items()}
        section: dict[str, Any] = {
            "type": "object",
            "properties": properties,
            "additionalProperties": bool(slot.variants),
        }
        return {"anyOf": [section, {"enum": [*slot.switches]}]} if slot.switches else section
    if slot.kind is Any:
        return {}
    if slot.container in (list, dict):
        entry = slot.below("0")
        below = _of(entry) if entry is not None else {}
        shape: dict[str, Any] = {"type": "array", "items": below} if slot.container is list else {"type": "object"}
    elif slot.choices:
        shape = {"enum": slot.choices}
    else:
        shape = {"type": _TYPES.get(slot.kind, "string")} | {_LIMITS[name]: end for name, end in slot.limits.items()}
    other: list[dict[str, Any]] = [{"enum": [*slot.words]}] if slot.words and not slot.choices else []
    other += [{"type": "null"}] if slot.nullable else []
    return {"anyOf": [shape, *other, POINTER]}
