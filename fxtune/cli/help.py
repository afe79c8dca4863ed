"""`fxtune help KEY`: explains a key of a recipe, by its meaning, allowed values, default, and the files where it acts.

    fxtune help optimizer.lr            # a key
    fxtune help learning_rate           # the same key, by its name in other trainers
    fxtune help data.sources.path       # a key of each entry of a list
    fxtune help techniques.lora         # a section: its keys, a line each
    fxtune help bench                   # a command: the same as fxtune bench --help
    fxtune help --json                  # all keys, for programs; --json also works with a key or a section

The texts come from the dataclasses of the config. A search for code that reads the key finds the files.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import re
from collections.abc import Iterator
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.padding import Padding

import fxtune
from fxtune.cli.answer import ANSWER
from fxtune.config import discovery
from fxtune.config.introspection import Slot, all_keys
from fxtune.config.root import Config
from fxtune.config.validate import Validator, command_line_only, expected, names_in_other_trainers
from fxtune.errors import ConfigError
from fxtune.objectives.base import Objective
from fxtune.objectives.registry import OBJECTIVES
from fxtune.system.terminal.console import plain, say, table

PACKAGE = Path(fxtune.__file__).parent
SHOWN_FILES = 4


class NoDefault(str):
    """The reason why a key has no default, in place of the default."""


def run(key: str = "") -> None:
    """Print the page of `key`. With --json also write the pages of `key` and of all keys below it; without a key, the
    pages of all keys. Raises ConfigError, with a similar key, if `key` does not exist."""
    keys = _entries(key) if key else ()
    validator = Validator(Config, lambda _: "", from_file=False)
    slot = validator.find(keys)
    if slot is None:
        raise ConfigError(validator.problems[0].removeprefix(": "))
    name = ".".join(keys)
    if ANSWER.file:
        below = [known for known in all_keys(Config) if f"{known}.".startswith(f"{name}." if name else "")]
        pages = [page for known in below or [name] for page in _pages(tuple(known.split(".")))]
        plain_pages = [{k: v for k, v in page.items() if not isinstance(v, NoDefault)} for page in pages]
        ANSWER.put({"keys": plain_pages})
    if not key:
        return
    for page in _pages(keys):
        say(f"{name} of {', '.join(page['of'])}" if page["of"] else name)
        if page["meaning"]:
            say(Padding(plain(page["meaning"]), (0, 0, 0, 2)))
        say(table("", ["", ""], [(label.replace("_", " "), _text(page[label])) for label in [*page][3:]]))
    section = slot.below("0") if slot.container is list else slot
    if section is not None and section.fields:
        prefix = f"{name}.0" if section is not slot else name
        say(table("", ["key", "", "default", ""], list(_listed(prefix, section))))
    if metrics := list(_metrics()) if name == "objective" else []:
        say(table("Metrics, as train/NAME and held out as eval/NAME", ["metric", "of", ""], metrics))


def _entries(key: str) -> tuple[str, ...]:
    """The parts of a key as it is typed. `data.sources.path`, the path of each entry, becomes `data.sources.0.path`. A
    name from another trainer becomes fxtune's key."""
    slot: Slot | None = Slot(Config)
    keys: list[str] = []
    known = key if key in Slot(Config).fields else names_in_other_trainers().get(key, key)
    for part in re.sub(r"\.?\[(\d+)\]", r".\1", known).split("."):
        if slot is not None and slot.container is list and not part.isdigit():
            keys.append("0")
            slot = slot.below("0")
        keys.append(part)
        slot = slot.below(part) if slot is not None else None
    return tuple(keys)


def _owners(keys: tuple[str, ...]) -> dict[type, list[str]]:
    """The dataclass with the field `keys[-1]`; for a key of any name, the dataclass of the section above. If variants
    of a section define the field differently, all their dataclasses, each with the names of its variants."""
    slot = Slot(Config)
    owners: dict[type, list[str]] = {Config: []}
    for key in keys:
        if slot.fields:
            owners = slot.definitions(key) if slot.variants else {}
            owners = owners if len(owners) > 1 else {slot.owner(key): []}
        below = slot.below(key)
        assert below is not None, "the key was found"
        slot = below
    return owners


def _pages(keys: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Yield the page of a key. If variants of its section define the key differently, yield a page for each."""
    name, slot = ".".join(keys), Validator(Config, lambda _: "").find(keys)
    assert slot is not None, "the key was found"
    section = slot.below("0") if slot.container is list else slot
    of_class = _class_doc(section.kind) if section and section.fields else None
    for owner, variants in _owners(keys).items():
        meaning = " ".join((_doc(owner, keys[-1]) or of_class or "").split())
        of = [f"{keys[-2]}={variant}" for variant in variants]
        yield {"key": name, "of": of, "meaning": meaning, **dict(_facts(name, slot, owner))}


def _facts(name: str, slot: Slot, owner: Any) -> Iterator[tuple[str, Any]]:
    yield "type", _type(slot)
    if slot.choices:
        yield "values", slot.choices
    if slot.range:
        yield "range", slot.range
    if not slot.fields:
        yield "default", _default(owner, name.rpartition(".")[2])
    if group := discovery.groups().get(name):
        yield "config_group", [f"{name}={option}" for option in group]
    if others := [other for other, key in names_in_other_trainers().items() if key == name]:
        yield "also_called", f"{', '.join(others)} (by other trainers)"
    if command_line_only(name):
        yield "set_it", f"{name}=VALUE, on the command line only: a recipe may come from a stranger"
    elif not slot.fields:
        yield "set_it", f"{name}=VALUE on the command line, or in a recipe"
    if slot.fields:
        yield "its_file", f"fxtune/{Path(inspect.getfile(slot.kind)).relative_to(PACKAGE).as_posix()}"
    else:
        yield "acts_in", acts_in(name.split("."), owner)


def _listed(prefix: str, section: Slot) -> Iterator[list[str]]:
    for name, slot in section.fields.items():
        owner = section.owner(name)
        first = " ".join((_doc(owner, name) or "").split()).split(". ")[0].removesuffix(".")
        limits = f", {slot.range}" if slot.range else ""
        default = "" if slot.fields else _text(_default(owner, name))
        yield [f"{prefix}.{name}", f"{_type(slot)}{limits}", default, first]


def _metrics() -> Iterator[list[str]]:
    """Yield [name, its objectives, its meaning] for each metric of the objectives."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, objective in OBJECTIVES.items():
        assert issubclass(objective, Objective)
        for metric in objective.metrics.items():
            found.setdefault(metric, []).append(name)
    for (name, text), owners in found.items():
        yield [name, ", ".join(owners), text]


def _type(slot: Slot) -> str:
    if slot.fields:
        return "a section of keys"
    if slot.kind is Any:
        return "anything"
    if slot.container is list:
        entry = slot.below("0")
        return f"a list, each entry {_type(entry) if entry else 'anything'}"
    return ("one of the values" if slot.choices else expected(slot)) + (" or null" if slot.nullable else "")


def _default(owner: Any, name: str) -> Any:
    found = next((item for item in dataclasses.fields(owner) if item.name == name), None)
    if found is None:
        return NoDefault("none: a key of any name")
    value = found.default if found.default_factory is dataclasses.MISSING else found.default_factory()
    if value == "???" or value is dataclasses.MISSING:
        return NoDefault("none: it must be set")
    if isinstance(value, list):
        return [entry.value if isinstance(entry, Enum) else entry for entry in value]
    return value.value if isinstance(value, Enum) else value


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) if value and all(isinstance(entry, str) for entry in value) else str(value)
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def acts_in(keys: list[str], owner: Any) -> list[str]:
    """The files whose code reads a key. Code reads `train.log_every` as `config.train.log_every`, or as `.log_every`
    of a variable that holds the section."""
    section, name = next((key for key in reversed(keys[:-1]) if not key.isdigit()), ""), keys[-1]
    classes = {base.__name__ for base in _classes(owner)}
    defined = Path(inspect.getfile(owner))
    found = [file for file in _files() if _reads(file, section, name, classes, file == defined)]
    found = [file for file in found if file.relative_to(PACKAGE).parts[0] not in ("config", "cli")] or found
    found.sort(key=lambda file: (file.parent != defined.parent, file == defined, file))
    if not found and not defined.is_relative_to(PACKAGE):  # a plugin defines the key
        return [discovery.place(defined)]
    return [f"fxtune/{file.relative_to(PACKAGE).as_posix()}" for file in (found or [defined])[:SHOWN_FILES]]


@functools.cache
def _files() -> dict[Path, str]:
    return {file: file.read_text(encoding="utf-8") for file in sorted(PACKAGE.rglob("*.py"))}


@functools.cache
def _nodes(file: Path) -> list[ast.AST]:
    kinds = (ast.arg, ast.AnnAssign, ast.Assign, ast.For, ast.comprehension, ast.Attribute)
    return [node for node in ast.walk(ast.parse(_files()[file])) if isinstance(node, kinds)]


def _reads(file: Path, section: str, name: str, classes: set[str], own: bool) -> bool:
    """Whether the code of `file` reads the attribute `name` of a variable that holds the section. `own`: `file`
    defines the section, so `self` holds it."""
    if not re.search(rf"\.{name}\b", _files()[file]):
        return False
    nodes = _nodes(file)
    holders = {section, *(["self"] if own else [])}
    for node in nodes:
        if isinstance(node, (ast.arg, ast.AnnAssign)) and node.annotation is not None:
            if classes & set(re.findall(r"\w+", ast.unparse(node.annotation))):
                holders.add(node.arg if isinstance(node, ast.arg) else _last(node.target))
        elif isinstance(node, ast.Assign):
            holders |= _aliases(node.targets[0], node.value, section)
        elif isinstance(node, (ast.For, ast.comprehension)) and _last(node.iter) == section:
            holders.add(_last(node.target))
    return any(
        isinstance(node, ast.Attribute) and node.attr == name and _last(node.value) in holders for node in nodes
    )


def _aliases(target: ast.expr, value: ast.expr, section: str) -> set[str]:
    """The names that `data, options = config.data, config.optimizer` gives to the section."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        pairs = zip(target.elts, value.elts, strict=False)
        return set().union(*(_aliases(left, right, section) for left, right in pairs))
    return {_last(target)} if isinstance(value, ast.Attribute) and value.attr == section else set()


def _last(node: ast.expr) -> str:
    """The last name of `a.b.c`; empty for other expressions."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _classes(owner: Any) -> list[Any]:
    return [base for base in owner.__mro__ if dataclasses.is_dataclass(base)]


def _doc(owner: Any, name: str) -> str | None:
    """The docstring of a field: the string under it."""
    for base in _classes(owner):
        (parsed,) = ast.parse(inspect.getsource(base)).body
        body = parsed.body if isinstance(parsed, ast.ClassDef) else []
        for entry, after in pairwise(body):
            is_field = isinstance(entry, ast.AnnAssign) and ast.unparse(entry.target) == name
            if is_field and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                return str(after.value.value)
    return None


def _class_doc(kind: type) -> str | None:
    """The docstring of a section's class, or else the first paragraph of its module's docstring."""
    text = kind.__doc__ or ""
    if text and not text.startswith(f"{kind.__name__}("):  # the default docstring of a dataclass
        return text
    module = inspect.getmodule(kind)
    return ((module.__doc__ if module else None) or "").split("\n\n")[0] or None
