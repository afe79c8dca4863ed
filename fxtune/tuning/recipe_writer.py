"""Writes a recipe from the result of a search: a header for people, and the keys that differ from the recipe on which
it builds.

The new recipe builds on the user's recipe by name if that recipe is in ./recipes or ships with fxtune. Otherwise the
new recipe repeats the keys of the user's recipe. Before the new recipe is written, it is composed and must give
exactly the config that was measured.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

from fxtune.config import discovery
from fxtune.config.compose import load
from fxtune.config.overrides import Choice, ChoiceKind, RecipeStore
from fxtune.config.root import Config
from fxtune.config.validate import command_line_only
from fxtune.errors import ConfigError, StorageError, writing
from fxtune.system.files.atomic_files import replace_text
from fxtune.system.terminal.redact import redact

MARK = "# Found by: fxtune "
"""A line in the header of every file that is written here."""
WAY_OUT = "or give another place with --output"


def output_path(overrides: list[str], name: str, output: str | None, suffix: str = "tuned") -> Path:
    """The path of the new recipe, by default recipes/NAME_SUFFIX.yaml. Raises ConfigError for a bad name, and
    StorageError if a file exists at the path that fxtune did not write."""
    path = Path(output or discovery.LOCAL / f"{[name, *recipe_names(overrides)][-1]}_{suffix}.yaml")
    if path.suffix != ".yaml" or not discovery.is_name(path.stem):
        raise ConfigError(f"--output {output}: a recipe is a file NAME.yaml, and NAME has {discovery.NAME_CHARACTERS}")
    with writing(f"{path} cannot be written", WAY_OUT):
        if path.exists() and MARK not in path.read_text(encoding="utf-8", errors="replace"):
            raise StorageError(f"{path} exists, and fxtune did not write it: give another name with --output")
    return path


def choices(overrides: list[str]) -> list[Choice]:
    store = RecipeStore(Config)
    return [store.override(text) for text in overrides]


def recipe_names(overrides: list[str]) -> list[str]:
    return [name for choice in choices(overrides) if choice.kind is ChoiceKind.recipe for name in choice.names]


def write(path: Path, header: Iterable[str], overrides: list[str], measured: Config) -> None:
    """Write the recipe that gives `measured`. An earlier file is kept as NAME.yaml.old. Raises StorageError."""
    comments = "".join(f"# {redact(line)}".rstrip() + "\n" for line in header)
    names = [name for name in recipe_names(overrides) if name in discovery.recipes()]
    for known in (names, []):
        text = f"{comments}# @package _global_\n{_yaml(redact(_changes(known, measured)))}"
        if _composes_to(text, path.name, measured):
            break
    else:
        raise AssertionError(f"the recipe does not give the config that was measured:\n{text}")
    with writing(f"{path} cannot be written", WAY_OUT):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            replace_text(path.with_name(f"{path.name}.old"), path.read_text(encoding="utf-8"))
        replace_text(path, text)


def _changes(names: list[str], measured: Config) -> dict[str, Any]:
    """The content of a recipe that builds on the recipes `names` and gives `measured`."""
    try:
        base = load([f"+recipe=[{','.join(names)}]"]) if names else Config()
    except ConfigError:  # the recipes do not compose without keys of the command line
        names, base = [], Config()
    body = _shareable(_difference(measured, base))
    body.get("run", {}).pop("name", None)  # the name of the new file replaces it
    defaults = {"defaults": [*names, "_self_"]} if names else {}
    return {**defaults, **{key: value for key, value in body.items() if value != {}}}


def _difference(value: Any, base: Any) -> Any:
    """A value as plain data. Of a dataclass, only the fields that differ from the fields of `base`."""
    if isinstance(value, list):
        # Each entry of a list in a recipe is built from the defaults of its class.
        return [_difference(entry, type(entry)()) for entry in value]
    if dataclasses.is_dataclass(value):
        # Not vars(): a technique has private state beside its options.
        names = [entry.name for entry in dataclasses.fields(value)]
        own: Any = type(value)
        base = base if isinstance(base, own) else own()  # another objective has other options
        pairs = ((name, getattr(value, name), getattr(base, name)) for name in names)
        return {name: _difference(mine, other) for name, mine, other in pairs if mine != other}
    return value.value if isinstance(value, Enum) else value


def _composes_to(text: str, name: str, config: Config) -> bool:
    """Whether a recipe with this text gives `config`. The run's name, secrets and command-line keys may differ."""

    def comparable(given: Config) -> Any:
        plain = redact(_shareable(dataclasses.asdict(given)))
        plain["run"].pop("name")
        return plain

    with tempfile.TemporaryDirectory(prefix="fxtune-tune-") as scratch:
        draft = Path(scratch) / name
        draft.write_text(text, encoding="utf-8")
        try:
            return bool(comparable(load([f"+recipe='{draft}'"])) == comparable(config))
        except ConfigError:
            return False


def _shareable(value: Any, prefix: str = "") -> Any:
    """Plain data without the keys that are allowed only on a command line."""
    if not isinstance(value, dict):
        return value
    kept = {key: inner for key, inner in value.items() if not command_line_only(f"{prefix}{key}")}
    return {key: _shareable(inner, f"{prefix}{key}.") for key, inner in kept.items()}


def _yaml(body: dict[str, Any]) -> str:
    """YAML of the sections in the order of the config, with a blank line between two sections."""
    order = ["defaults", *(entry.name for entry in dataclasses.fields(Config))]
    sections = ({key: body[key]} for key in sorted(body, key=order.index))
    return "\n".join(yaml.safe_dump(part, sort_keys=False, allow_unicode=True, width=120) for part in sections)
