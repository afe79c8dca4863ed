"""Writes recipes/fxtune.schema.json, and tests/repository/keys.txt: every key of a recipe with its type and default, and every command with its options.
A key or an option that is added, lost or changed shows in the diff of this file.

    python scripts/make/keys.py
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from fxtune.cli.commands import COMMANDS  # noqa: E402
from fxtune.cli.schema import recipe_schema  # noqa: E402
from fxtune.config.introspection import Slot, with_defaults  # noqa: E402
from fxtune.config.root import Config  # noqa: E402

SCHEMA = ROOT / "recipes" / "fxtune.schema.json"
FILE = ROOT / "tests" / "repository" / "keys.txt"


def type_of(slot: Slot) -> str:
    """`float, above 0, or auto`, `int or null`, `list of str`, `adamw | sgd`."""
    if slot.choices:
        text = " | ".join(slot.choices)
    elif (entry := slot.below("0" if slot.container is list else "NAME")) is not None and slot.container:
        text = f"{slot.container.__name__} of {'sections' if entry.fields else type_of(entry)}"
    else:
        text = "anything" if slot.kind is Any else slot.kind.__name__
    text += f", {slot.range}" * bool(slot.range and not slot.container)
    others = [*(() if slot.choices else slot.words), *["null"] * (slot.nullable and slot.kind is not Any)]
    return " or ".join([text, *others])


def keys(section: Slot, prefix: str = "", listed: dict[type, str] | None = None) -> Iterator[str]:
    """A line for each key of a section: `optimizer.lr: float, above 0, = 0.0002`. Entries that two lists have in common
    are listed once. `listed`: where, by their class."""
    listed = {} if listed is None else listed
    for name, slot in section.fields.items():
        entry = slot.below("0") if slot.container is list else slot
        if not slot.fields:
            default = with_defaults(section.owner(name), {}).get(name, "???")
            value = "must be set" if default == "???" else f"= {json.dumps(default, ensure_ascii=False)}"
            yield f"{prefix}{name}: {type_of(slot)} {value}"
        if entry is None or not entry.fields:
            continue
        below = f"{prefix}{name}.{'' if entry is slot else '0.'}"
        if entry.kind in listed:
            yield f"{below}: the keys of {listed[entry.kind]}"
        else:
            listed[entry.kind] = below
            yield from keys(entry, below, listed)


def options() -> Iterator[str]:
    """A line for each command, and one for each of its options: `fxtune plan --gpu NAME`."""
    yield "fxtune COMMAND --json FILE"
    for name, command in COMMANDS.items():
        yield f"fxtune {name}"
        for option, settings in (command.options or {}).items():
            value = "{" + ",".join(settings["choices"]) + "}" if "choices" in settings else settings.get("metavar", "")
            yield f"fxtune {name} {option} {value}".rstrip()


def text() -> str:
    return "\n".join([*keys(Slot(Config)), *options()]) + "\n"


def _a_key_a_line(value: Any, indent: str = "\n") -> str:
    """JSON with a line for each key of a recipe."""
    text, deeper = json.dumps(value, ensure_ascii=False), indent + " "
    if '"properties"' not in text:
        return text
    if isinstance(value, list):
        return "[" + ",".join(deeper + _a_key_a_line(entry, deeper) for entry in value) + f"{indent}]"
    inside = (f"{deeper}{json.dumps(key)}: {_a_key_a_line(entry, deeper)}" for key, entry in value.items())
    return "{" + ",".join(inside) + f"{indent}}}"


if __name__ == "__main__":
    FILE.write_text(text())
    SCHEMA.write_text(_a_key_a_line(recipe_schema()) + "\n")
