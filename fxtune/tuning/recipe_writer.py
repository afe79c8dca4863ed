"""Writes what `fxtune tune` found as a recipe: a header for people, and the keys that differ from what it builds on.

It builds on the user's recipe where that has a name that is found again (./recipes, or shipped), and repeats what the command
line said; a recipe that was given as a file elsewhere is repeated as a whole. Either way the file is composed before it is
written, and must come to exactly the config that was measured.
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
from fxtune.config.overrides import Choice, Kind, RecipeStore, override_value
from fxtune.config.root import Config
from fxtune.config.validate import command_line_only
from fxtune.errors import ConfigError, StorageError
from fxtune.system.atomic_files import replace_text
from fxtune.system.redact import redact
from fxtune.tuning.search_space import Deltas, applied, value_of

MARK = "# Found by: fxtune tune "
"""A line of the header of each file that was written here."""
SUFFIX = ".old"
"""An earlier file of ours keeps its content under this name, which is no recipe's."""


def place_for(overrides: list[str], name: str, output: str | None) -> Path:
    """Where the recipe goes. Raises ConfigError for a name that is none, StorageError where somebody's own file is there."""
    if output is None:
        recipes = [recipe for choice in choices(overrides) if choice.kind is Kind.recipe for recipe in choice.names]
        output = str(discovery.LOCAL / f"{recipes[-1] if recipes else name}_tuned.yaml")
    path = Path(output)
    if path.suffix != ".yaml" or not all(letter.isalnum() or letter in "_-." for letter in path.stem):
        raise ConfigError(
            f"--output {output}: a recipe is a file NAME.yaml, and NAME has letters, digits, `_`, `-` and `.`"
        )
    try:
        if path.exists() and MARK not in path.read_text(errors="replace"):
            raise StorageError(f"{output} is there, and fxtune tune did not write it: give another name with --output")
    except OSError as error:
        raise StorageError(f"{output} cannot be written: {error}. Give another place with --output.") from error
    return path


def choices(overrides: list[str]) -> list[Choice]:
    """What a command line chooses and sets, in the order in which it counts."""
    shelf = RecipeStore(Config)
    return sorted((shelf.override(text) for text in overrides), key=lambda choice: choice.kind.value)


def write(path: Path, header: Iterable[str], overrides: list[str], config: Config, deltas: Deltas) -> str:
    """Write the recipe and return its text. `config`: what `overrides` come to, before `deltas`. Raises StorageError."""
    made = applied(config, deltas)
    top = "".join(f"# {redact(line)}".rstrip() + "\n" for line in header)
    for body in (_building_on(overrides, config, deltas), _whole(made)):
        text = f"{top}# @package _global_\n{_yaml(redact(body))}"
        if _comes_to(path.name, text, made):
            break
    else:
        raise AssertionError(f"the recipe does not come to what was measured:\n{text}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            replace_text(path.with_name(path.name + SUFFIX), path.read_text())
        replace_text(path, text)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error}. Give another place with --output.") from error
    return text


def _comes_to(name: str, text: str, config: Config) -> bool:
    """Whether a recipe of this text is composed to `config`."""
    with tempfile.TemporaryDirectory(prefix="fxtune-tune-") as scratch:
        draft = Path(scratch) / name
        draft.write_text(text)
        try:
            return _plain(load([f"+recipe={draft}"])) == _plain(config)
        except ConfigError:
            return False


def _building_on(overrides: list[str], config: Config, deltas: Deltas) -> dict[str, Any]:
    """On the recipes and groups that were chosen, with the keys of the command line and `deltas`."""
    known, body = discovery.recipes(), dict[str, Any]()
    defaults: list[Any] = []
    for choice in choices(overrides):
        key, _, value = choice.text.lstrip("+").partition("=")
        if choice.kind is Kind.recipe:
            defaults += [name for name in choice.names if name in known]
        elif choice.kind is Kind.group:
            defaults.append({f"override /{key}": choice.names[0] if len(choice.names) == 1 else list(choice.names)})
        elif choice.kind is Kind.key and not command_line_only(key):
            _set(body, *_key(config, key, choice.text))
    for key, value in deltas.items():
        _set(body, key, value)
    return {**({"defaults": [*defaults, "_self_"]} if defaults else {}), **body}


def _key(config: Config, key: str, text: str) -> tuple[str, Any]:
    """A key of the command line and its value. A file cannot name an entry of a list, so that list is given whole."""
    parts = key.split(".")
    number = next((at for at, part in enumerate(parts) if part.isdigit()), None)
    if number is not None:
        key = ".".join(parts[:number])
        return key, [_entry(item) for item in value_of(config, key)]
    return key, override_value(text)


def _whole(config: Config) -> dict[str, Any]:
    """All that differs from the defaults, but for the run's name, which is the file's, and what only a command line says."""
    body: dict[str, Any] = _shareable(_differing(config, Config()))
    body.get("run", {}).pop("name", None)
    return {key: value for key, value in body.items() if value != {}}


def _differing(value: Any, default: Any) -> Any:
    """A dataclass as a dict of what is not as in `default`."""
    found = {}
    for entry in dataclasses.fields(value):
        mine, other = getattr(value, entry.name), getattr(default, entry.name)
        if mine == other:
            continue
        if dataclasses.is_dataclass(mine):
            found[entry.name] = _differing(mine, other)
        elif isinstance(mine, list):
            found[entry.name] = [_entry(item) for item in mine]
        else:
            found[entry.name] = mine.value if isinstance(mine, Enum) else mine
    return found


def _entry(item: Any) -> Any:
    """An entry of a list, which is made anew wherever the list is given."""
    return item if isinstance(item, (str, int, float)) or item is None else _differing(item, type(item)())


def _set(body: dict[str, Any], key: str, value: Any) -> None:
    *path, name = key.split(".")
    for part in path:
        body = body.setdefault(part, {})
    body[name] = value


def _plain(config: Config) -> dict[str, Any]:
    """For comparing: all but the run's name, secrets, and what only a command line says."""
    plain: dict[str, Any] = redact(_shareable(dataclasses.asdict(config)))
    plain["run"].pop("name")
    return plain


def _shareable(value: Any, prefix: str = "") -> Any:
    if not isinstance(value, dict):
        return value
    return {
        key: _shareable(inner, f"{prefix}{key}.")
        for key, inner in value.items()
        if not command_line_only(f"{prefix}{key}")
    }


def _yaml(body: dict[str, Any]) -> str:
    """As people write it: sections in the order of the config, a blank line between them."""
    order = ["defaults", *(entry.name for entry in dataclasses.fields(Config))]
    return "\n".join(
        yaml.safe_dump({key: body[key]}, sort_keys=False, allow_unicode=True, width=120)
        for key in sorted(body, key=order.index)
    )
