"""Reads the overrides of a command line, and the recipes and groups that they choose, before Hydra sees them.

`key=`, `+key=` and `++key=` are all accepted, and `RecipeStore.override` returns the spelling that Hydra needs.
`RecipeStore.recipe` merges a recipe over the recipes and groups in its `defaults:`.
"""

from __future__ import annotations

import functools
import glob
import json
import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Glob, Override, QuotedString, RangeSweep
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf

from fxtune.config import discovery
from fxtune.config.introspection import Keys, Slot, is_free
from fxtune.config.validate import Validator
from fxtune.config.yaml_reader import RecipeFile, read
from fxtune.errors import ConfigError, did_you_mean, nearest
from fxtune.plugins import PLUGIN_ADDS

COMMAND_LINE = "on the command line"


class ChoiceKind(Enum):
    """What an override sets. Hydra must see overrides in the order of these values, because a later override wins."""

    hydra = 0
    recipe = 1
    group = 2
    key = 3


@dataclass(frozen=True)
class Choice:
    kind: ChoiceKind
    text: str
    """The spelling that Hydra needs."""
    key: str
    sweeps: bool
    names: tuple[str, ...] = ()
    """The recipes or group options that the override chooses, in any job of a sweep."""


class RecipeStore:
    """The recipes and groups that can be chosen from this working directory. Each file is read once, as plain data."""

    def __init__(self, schema: type):
        self.schema = schema
        self.groups = discovery.groups()
        self.paths = {name: recipe.path for name, recipe in discovery.recipes().items()}
        self.recipes: dict[str, DictConfig] = {}
        self.options: dict[tuple[str, str], tuple[dict[str, Any], bool]] = {}
        self.grid: list[Choice] = []
        """The overrides in the grids (hydra.sweeper.params) of the recipes that were read."""
        self._parser = OverridesParser.create()

    def override(self, text: str, place: str = COMMAND_LINE, from_file: bool = False) -> Choice:
        """Check the override `text`. `place`: where it is written, for messages. Raises one ConfigError with every
        mistake in it."""
        with written_at(place):
            typed, text = text, _quoted(text)
            try:
                parsed = self._parser.parse_override(text)
            except HydraException as error:
                raise ConfigError(self._why_unreadable(typed, error)) from error
            if choice := self._hydra_or_group(parsed, text, from_file):
                return choice
        key, value = parsed.key_or_group, text.partition("=")[2]
        validator, keys = Validator(self.schema, lambda _: place, from_file), tuple(key.split("."))
        slot = validator.find(keys)
        if slot is not None and value in slot.switches:
            return self.override(f"{key}.{value}=true", place, from_file)
        if slot is not None:
            for choice in _values(parsed, ()):
                validator.check(slot, choice, keys)
        refuse(validator.problems)
        spelling = f"{'++' * is_free(self.schema, keys)}{key}={value}"
        return Choice(ChoiceKind.key, spelling, key, parsed.is_sweep_override())

    def _hydra_or_group(self, parsed: Override, text: str, from_file: bool) -> Choice | None:
        """The choice of a recipe, a group's option or a plugin of Hydra; None if the override is a key."""
        key, value, sweeps = parsed.key_or_group, text.partition("=")[2], parsed.is_sweep_override()
        if parsed.is_delete():
            raise ConfigError(f"`{text}`: no key can be taken out of a config; give it another value")
        if parsed.package is not None:
            raise ConfigError(f"`{text}`: a group has one place, `@` cannot move it")
        if key == "hydra" or key.startswith(("hydra.", "hydra/")):
            return _hydra_setting(text, key, from_file)
        if key == "recipe":
            names = self._find_recipes(_values(parsed, self.paths))
            listed = f"[{','.join(names)}]" if isinstance(parsed.value(), list) else ",".join(names)
            return Choice(ChoiceKind.recipe, _quoted(f"+recipe={listed}"), key, sweeps, tuple(names))
        if key in self.groups:
            options = self._find_options(key, _values(parsed, self.groups[key]))
            return Choice(ChoiceKind.group, f"+{key}={value}", key, sweeps, tuple(options))
        near_group = None if "." in key else nearest(key, [*self.groups, "recipe"], 0.75)
        if near_group and key not in Slot(self.schema).fields:
            better = f"{'+' * (near_group == 'recipe')}{near_group}={value}"
            raise ConfigError(f"unknown key `{key}`; did you mean `{better}`?")
        return None

    def recipe(self, name: str, trail: tuple[str, ...] = ()) -> DictConfig:
        """The recipe `name`, merged over the recipes and groups in its `defaults:`. `trail`: recipes that build on it.

        Raises one ConfigError with every mistake in it.
        """
        if name in trail:
            path = discovery.place(self.paths[name])
            raise ConfigError(f"{path}: the recipes {' -> '.join((*trail, name))} build on each other")
        if name not in self.recipes:
            document = read(self.paths[name])
            validator = Validator(self.schema, document.where)
            if document.package not in (None, "_global_"):
                validator.add((), f"a recipe's header is `# @package _global_`, not `{document.package}`")
            own = {key: value for key, value in document.data.items() if key not in ("defaults", "hydra")}
            validator.check(Slot(self.schema), own, ())
            layers = self._read_defaults(document, validator, (*trail, name))
            self.grid += self._read_grid(document, validator)
            refuse(validator.problems)
            if isinstance(run := own.get("run") or {}, dict):
                own["run"] = {"name": name, **run}
            _find_data(own.get("data"), self.paths[name])
            # The recipe's own values win over its defaults, even if the list has _self_ elsewhere or not at all.
            self.recipes[name] = self._merged([*layers, own])
        return self.recipes[name]

    def leave_out(self, section: str) -> None:
        """Remove a section with variants from each recipe, because the command line chooses the variant."""
        if self._variants(section):
            for recipe in self.recipes.values():
                recipe.pop(section, None)

    def add_entry(self, key: str) -> None:
        """Add an empty entry to the lists of the recipes if `key` sets a key of the entry behind the last one."""
        if found := re.fullmatch(r"(.+?)\.(\d+)\.[a-z].*", key):
            for recipe in self.recipes.values():
                entries = OmegaConf.select(recipe, found[1])
                if isinstance(entries, ListConfig) and len(entries) == int(found[2]):
                    entries.append({})

    def _merged(self, layers: Sequence[Any]) -> DictConfig:
        """All layers merged, later ones over earlier ones. A layer that names a variant of a section, such as an
        objective, replaces the section, because the earlier options may belong to another variant."""
        merged = OmegaConf.create()
        for layer in layers:
            for section, values in layer.items():
                if isinstance(values, Mapping) and "name" in values and self._variants(section):
                    merged.pop(section, None)
            merged = OmegaConf.merge(merged, layer)  # type: ignore[assignment]
        return merged

    def _variants(self, section: str) -> bool:
        slot = Slot(self.schema).below(section)
        return slot is not None and bool(slot.variants)

    def group(self, group: str, option: str) -> tuple[dict[str, Any], bool]:
        """The values of a group's option, and whether their keys start at the root instead of at the section."""
        if (group, option) not in self.options and self.groups[group][option].suffix == ".py":  # of a plugin
            self.options[group, option] = {"name": option}, False
        if (group, option) not in self.options:
            document = read(self.groups[group][option])
            whole_config = document.package == "_global_"
            section: Keys = () if whole_config else (group,)
            document.lines = {(*section, *keys): line for keys, line in document.lines.items()}
            validator = Validator(self.schema, document.where)
            slot = validator.find(section)
            if slot is not None:
                validator.check(slot, document.data, section)
            refuse(validator.problems)
            self.options[group, option] = document.data, whole_config
        return self.options[group, option]

    def _read_defaults(self, document: RecipeFile, validator: Validator, trail: tuple[str, ...]) -> list[Any]:
        """The layers that a recipe builds on: recipes (`llama_lora`) and groups (`override /optimizer: muon`)."""
        entries = document.data.get("defaults") or []
        if not isinstance(entries, list):
            validator.add(("defaults",), "`defaults` is a list: [llama_lora, {override /optimizer: muon}, _self_]")
            return []
        layers: list[Any] = []
        for index, entry in enumerate(entries):
            try:
                if isinstance(entry, str) and entry in self.paths:
                    layers.append(self.recipe(entry, trail))
                elif entry != "_self_":
                    with written_at(document.where(("defaults", str(index)))):
                        group, options = self._chosen_group(entry)
                    for option in options:
                        data, whole_config = self.group(group, option)
                        layers.append(data if whole_config else {group: data})
            except ConfigError as error:
                validator.problems.append(str(error))
        return layers

    def _chosen_group(self, entry: Any) -> tuple[str, list[str]]:
        """The group and the options of an entry of `defaults` that is not a recipe."""
        if isinstance(entry, str):
            raise ConfigError(f"there is no recipe `{entry}` to build on{did_you_mean(entry, self.paths)}")
        if not isinstance(entry, dict) or len(entry) != 1:
            raise ConfigError("an entry of `defaults` is a recipe's name, `override /GROUP: OPTION`, or _self_")
        ((key, value),) = entry.items()
        group = str(key).removeprefix("override ").strip().lstrip("/")
        if group.startswith("hydra"):
            raise ConfigError(
                f"a recipe cannot choose `{group}`, a plugin is code; put {group}={value} on the command line"
            )
        if group not in self.groups:
            raise ConfigError(f"there is no config group `{group}`{did_you_mean(group, self.groups)}")
        return group, self._find_options(group, [value])

    def _read_grid(self, document: RecipeFile, validator: Validator) -> list[Choice]:
        """The grid of a recipe for `-m`. A recipe may have no other setting of Hydra: they run code or move files."""
        settings: Any = document.data.get("hydra")
        settings = {} if settings is None else settings
        path: Keys = ("hydra",)
        for allowed in ("sweeper", "params"):
            others = (
                [str(key) for key in settings if key != allowed] if isinstance(settings, dict) else [str(settings)]
            )
            below = None if others else settings.get(allowed, {})
            if others or not isinstance(below, dict):
                wrong = (*path, *(others or [allowed])[:1])
                validator.add(
                    wrong,
                    f"`{'.'.join(wrong)}`: of Hydra's own settings a recipe may have only hydra.sweeper.params, a "
                    "grid for -m: the others run code or move files. Put yours on the command line",
                )
                return []
            settings, path = below, (*path, allowed)
        grid = []
        for key, value in settings.items():
            place = document.where((*path, str(key)))
            try:
                choice = self.override(f"{key}={value}", place, from_file=True)
                if choice.kind is ChoiceKind.recipe:
                    raise ConfigError(f"{place}: a recipe cannot sweep over recipes")
                grid.append(choice)
            except ConfigError as error:
                validator.problems.append(str(error))
        return grid

    def _find_recipes(self, values: Iterable[Any]) -> list[str]:
        """The names of the recipes that `values` choose by name or by path."""
        names: list[str] = []
        for value in _flat(values):
            found = discovery.find(str(value))
            if found.name in names and self.paths[found.name].resolve() != found.path.resolve():
                raise ConfigError(f"two recipes are called {found.name}; rename one of them")
            if not discovery.is_name(found.name):
                raise ConfigError(f"rename {found.path}: a recipe's name has {discovery.NAME_CHARACTERS}")
            self.paths[found.name] = found.path
            names.append(found.name)
        return names

    def _find_options(self, group: str, values: Iterable[Any]) -> list[str]:
        known, options = self.groups[group], list(_flat(values))
        for option in options:
            if not isinstance(option, str):
                raise ConfigError(
                    f"`{group}` is a config group: {group}=NAME with one of {', '.join(known)}; its keys are set one "
                    "by one"
                )
            if option not in known:
                others = f" {PLUGIN_ADDS}" * self._variants(group)
                raise ConfigError(f"the config group `{group}` has no `{option}`{did_you_mean(option, known)}{others}")
        return options

    def _why_unreadable(self, text: str, error: HydraException) -> str:
        key, equals, value = text.partition("=")
        dotted = re.sub(r"\.?\[(\d+)\]", r".\1", key)
        if dotted != key:
            return f"`{text}`: an entry of a list is named by a dot and its number, counted from 0: {dotted}={value}"
        if equals:
            reason = str(error).strip().split("\n", 1)[0]
            quoted = f"\"{key}='{value}'\""
            inner = value[1:-1] if value[1:] and value[0] == value[-1] and value[0] in "\"'" else value
            if "'" in inner:
                escaped = inner.replace("\\", "\\\\").replace('"', '\\"')
                quoted = shlex.quote(f'{key}="{escaped}"')
            if value[:1] + value[-1:] == "[]" and not set(value) & set('"{'):
                entries = ",".join(json.dumps(entry.strip().strip("'")) for entry in value[1:-1].split(","))
                quoted = shlex.quote(f"{key}=[{entries}]")
            if (plain := re.sub(r"""([{,]\s*)(["'])([^"']*)\2(?=\s*:)""", r"\1\3", value)) != value:
                return f"`{text}` cannot be read: names in {{}} have no quotes here. Write '{key}={plain}'"
            return f"`{text}` cannot be read ({reason}). Quote the value twice, for the shell and for Hydra: {quoted}"
        if text in self.paths or text.endswith(discovery.ENDINGS):
            return f"`{text}` is a {'recipe' if text in self.paths else 'file'}: write +recipe={text}"
        if discovery.names_data(text):
            return f"`{text}` is a data file: write data.sources.0.path={text}, beside +recipe=NAME"
        return f"`{text}` is neither a command of fxtune nor key=value"


def _hydra_setting(text: str, key: str, from_file: bool) -> Choice:
    """The choice of a sweeper or launcher of Hydra. Only a command line may set one. Other settings of Hydra move
    files or run code, and are refused."""
    plugin = key in ("hydra/sweeper", "hydra/launcher") or key.startswith(("hydra.sweeper.", "hydra.launcher."))
    if from_file or not plugin:
        raise ConfigError(
            f"`{key}`: of Hydra's own settings only sweeper and launcher can be set, and only on the command line. "
            "run.dir=FOLDER says where a run goes; in a multirun, each job has a folder below it"
        )
    if "${" in text or any(part.startswith("_") for part in key.split(".")) or "_target_" in text:
        raise ConfigError(f"`{text}`: a config holds values, it cannot name code to run or read the environment")
    return Choice(ChoiceKind.hydra, text.lstrip("+") if "/" in key else f"++{text.lstrip('+')}", key, False)


@contextmanager
def written_at(place: str) -> Iterator[None]:
    """Put `place` before the message of a ConfigError."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from error


def refuse(problems: Iterable[str]) -> None:
    """Raise one ConfigError that lists all `problems`, each once, if there are any."""
    if unique := list(dict.fromkeys(problems)):
        raise ConfigError("\n".join(unique))


def _values(parsed: Override, names: Iterable[str]) -> list[Any]:
    """Each value that an override can take: one value, or the values of a sweep. A glob chooses from `names`."""
    value = parsed.value()
    if isinstance(value, ChoiceSweep):
        return [unquoted(item) for item in value.list]
    if isinstance(value, RangeSweep):
        return list(value.range())
    if isinstance(value, Glob):
        return value.filter(list(names))
    return [] if parsed.is_sweep_override() else [value]  # a sweeper plugin draws from an interval


def unquoted(value: Any) -> Any:
    """A parsed value of an override as plain Python: texts in quotes, also inside of lists and dicts, become str."""
    if isinstance(value, list):
        return [unquoted(item) for item in value]
    if isinstance(value, dict):
        return {unquoted(key): unquoted(item) for key, item in value.items()}
    return value.text if isinstance(value, QuotedString) else value


def _quoted(text: str) -> str:
    """The override, with quotes around those parts of its value with letters that Hydra takes only in quotes (`ü`)."""
    key, equals, value = text.partition("=")
    parts = re.split(r"('(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"|[,\[\]{}:()'\"]\s*)", value)
    return key + equals + "".join(part if part.isascii() or part[0] in "'\"" else f"'{part}'" for part in parts)


def _find_data(data: Any, recipe: Path) -> None:
    """Change paths in a recipe's section `data`, if they exist beside the recipe but not in the working directory."""
    if not isinstance(data, dict):
        return
    lists = (data.get(name) for name in ("sources", "eval_sources", "general"))
    entries = [entry for entries in lists for entry in entries or []]
    owners = [(entry, "path") for entry in [*entries, data.get("questions") or {}]] + [(data, "chat_template")]
    for owner, key in owners:
        written = owner.get(key) if isinstance(owner, dict) else None
        if isinstance(written, str) and not _exists(Path(), written) and _exists(recipe.parent, written):
            owner[key] = discovery.place(recipe.parent / written)
            _say_once(f"{discovery.place(recipe)}: {written} is not in {Path.cwd()}, so {owner[key]} is read.")


def _exists(folder: Path, written: str) -> bool:
    """Whether a file, a folder or a glob names something in `folder`."""
    path = os.path.join(folder, os.path.expanduser(written))
    return "${" not in written and (os.path.exists(path) or (glob.has_magic(path) and any(glob.iglob(path))))


@functools.cache
def _say_once(line: str) -> None:
    print(f"fxtune: {line}", file=sys.stderr, flush=True)  # standard output may be the YAML of --cfg


def _flat(values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        yield from value if isinstance(value, list) else [value]
