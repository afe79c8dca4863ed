"""Reads the overrides of a command line and the recipes and groups that they choose. Everything is
checked before Hydra sees it.

Hydra distinguishes `key=`, `+key=` and `++key=`, and takes the order of config groups from a file. Here each spelling
is accepted, and `RecipeStore.override` returns the one that Hydra needs. `RecipeStore.recipe` merges a recipe over the
recipes and groups in its `defaults:`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Glob, Override, RangeSweep
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from fxtune.config import discovery
from fxtune.config.introspection import Keys, Slot, is_free
from fxtune.config.validate import Validator
from fxtune.config.yaml_reader import Document, read
from fxtune.errors import ConfigError, did_you_mean, nearest

COMMAND_LINE = "on the command line"


class Kind(Enum):
    """What an override does. The values are the order in which Hydra must see them: a later one wins."""

    hydra = 0
    recipe = 1
    group = 2
    key = 3


@dataclass(frozen=True)
class Choice:
    """One checked override."""

    kind: Kind
    text: str
    """The spelling that Hydra needs."""
    key: str
    sweeps: bool
    names: tuple[str, ...] = ()
    """The recipes or group options that it chooses, in any job of a sweep."""


class RecipeStore:
    """The recipes and groups that can be chosen from this working directory. Each is read
    once and kept as plain data."""

    def __init__(self, schema: type):
        self.schema = schema
        self.groups = discovery.groups()
        self.paths = {name: recipe.path for name, recipe in discovery.recipes().items()}
        self.recipes: dict[str, DictConfig] = {}
        self.options: dict[tuple[str, str], tuple[dict[str, Any], bool]] = {}
        self.grid: list[Choice] = []
        """The grids (hydra.sweeper.params) of the recipes that were read."""
        self._parser = OverridesParser.create()

    def override(self, text: str, place: str = COMMAND_LINE, from_file: bool = False) -> Choice:
        """Check the override `text`, which is written at `place`. Raises one ConfigError with every mistake in it."""
        try:
            parsed = self._parser.parse_override(text)
        except HydraException as error:
            raise ConfigError(f"{place}: {self._why_unreadable(text, error)}") from error
        key, (_, _, value), sweeps = parsed.key_or_group, text.partition("="), parsed.is_sweep_override()
        if parsed.is_delete():
            raise ConfigError(f"{place}: `{text}`: no key can be taken out of a config; give it another value")
        if parsed.package is not None:
            raise ConfigError(f"{place}: `{text}`: a group has one place, `@` cannot move it")
        if key == "hydra" or key.startswith(("hydra.", "hydra/")):
            return self._hydra_setting(text, key, place, from_file)
        if key == "recipe":
            names = self._find_recipes(_values(parsed, self.paths), place)
            listed = f"[{','.join(names)}]" if isinstance(parsed.value(), list) else ",".join(names)
            return Choice(Kind.recipe, f"+recipe={listed}", key, sweeps, tuple(names))
        if key in self.groups:
            options = self._find_options(key, _values(parsed, self.groups[key]), place)
            return Choice(Kind.group, f"+{key}={value}", key, sweeps, tuple(options))
        near_group = None if "." in key else nearest(key, [*self.groups, "recipe"], 0.75)
        if near_group and key not in Slot(self.schema).fields:
            better = f"{'+' * (near_group == 'recipe')}{near_group}={value}"
            raise ConfigError(f"{place}: unknown key `{key}`; did you mean `{better}`?")
        validator, keys = Validator(self.schema, lambda _: place, from_file), tuple(key.split("."))
        slot = validator.find(keys)
        if slot is not None:
            for one in _values(parsed, ()):
                validator.check(slot, one, keys)
        refuse(validator.problems)
        return Choice(Kind.key, f"{'++' * is_free(self.schema, keys)}{key}={value}", key, sweeps)

    def recipe(self, name: str, trail: tuple[str, ...] = ()) -> DictConfig:
        """The recipe `name` as plain data, merged over what its `defaults:` name.

        `trail`: the recipes that build on it. Raises one ConfigError with every mistake in it.
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
            # A recipe wins over what it builds on, wherever (and whether) its defaults list has _self_.
            self.recipes[name] = OmegaConf.merge(*layers, own)  # type: ignore[assignment]
        return self.recipes[name]

    def group(self, group: str, option: str) -> tuple[dict[str, Any], bool]:
        """The values of a group's option, and whether their keys start at the root of the config instead
        of at the section `group`."""
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

    def _read_defaults(self, document: Document, validator: Validator, trail: tuple[str, ...]) -> list[Any]:
        """The layers that a recipe builds on, in order: recipes (`llama_lora`) and groups
        (`override /optimizer: muon`)."""
        entries = document.data.get("defaults") or []
        if not isinstance(entries, list):
            validator.add(("defaults",), "`defaults` is a list: [llama_lora, {override /optimizer: muon}, _self_]")
            return []
        layers: list[Any] = []
        for index, entry in enumerate(entries):
            try:
                layers += self._read_default(entry, document.where(("defaults", str(index))), trail)
            except ConfigError as error:
                validator.problems.append(str(error))
        return layers

    def _read_default(self, entry: Any, place: str, trail: tuple[str, ...]) -> list[Any]:
        if entry == "_self_":
            return []
        if isinstance(entry, str):
            if entry not in self.paths:
                hint = did_you_mean(entry, self.paths)
                raise ConfigError(f"{place}: there is no recipe `{entry}` to build on{hint}")
            return [self.recipe(entry, trail)]
        if not isinstance(entry, dict) or len(entry) != 1:
            raise ConfigError(
                f"{place}: an entry of `defaults` is a recipe's name, `override /GROUP: OPTION`, or _self_"
            )
        ((key, value),) = entry.items()
        group = str(key).removeprefix("override ").strip().lstrip("/")
        if group.startswith("hydra"):
            raise ConfigError(
                f"{place}: a recipe cannot choose `{group}`, a plugin is code; put {group}={value} on the command line"
            )
        if group not in self.groups:
            raise ConfigError(f"{place}: there is no config group `{group}`{did_you_mean(group, self.groups)}")
        layers = []
        for option in self._find_options(group, [value], place):
            data, whole_config = self.group(group, option)
            layers.append(data if whole_config else {group: data})
        return layers

    def _read_grid(self, document: Document, validator: Validator) -> list[Choice]:
        """A recipe's grid for `-m`. It is the only Hydra setting a recipe may have: the
        others run code or move files."""
        settings = document.data.get("hydra")
        if settings is None:
            return []
        path: Keys = ("hydra",)
        for allowed in ("sweeper", "params"):
            for key in settings if isinstance(settings, dict) else [settings]:
                if key != allowed or not isinstance(settings, dict) or not isinstance(settings[key], dict):
                    wrong = (*path, str(key))
                    validator.add(
                        wrong,
                        f"`{'.'.join(wrong)}`: of Hydra's own settings a recipe may have only hydra.sweeper.params, "
                        "a grid for -m: a recipe may come from a stranger, and the others run code or move files. "
                        "Put yours on the command line",
                    )
                    return []
            settings, path = settings.get(allowed, {}), (*path, allowed)
        grid = []
        for key, value in settings.items():
            place = document.where((*path, str(key)))
            try:
                choice = self.override(f"{key}={value}", place, from_file=True)
                if choice.kind is Kind.recipe:
                    raise ConfigError(f"{place}: a recipe cannot sweep over recipes")
                grid.append(choice)
            except ConfigError as error:
                validator.problems.append(str(error))
        return grid

    def _hydra_setting(self, text: str, key: str, place: str, from_file: bool) -> Choice:
        """The user may choose and set sweepers and launchers. Settings that move files or
        run other code are refused."""
        plugin = key in ("hydra/sweeper", "hydra/launcher") or key.startswith(("hydra.sweeper.", "hydra.launcher."))
        if from_file or not plugin:
            raise ConfigError(
                f"{place}: `{key}`: of Hydra's own settings only sweeper and launcher can be set, and only on the "
                "command line. run.dir=FOLDER says where a run goes; in a multirun, each job has a folder below it"
            )
        if "${" in text or any(part.startswith("_") for part in key.split(".")) or "_target_" in text:
            raise ConfigError(
                f"{place}: `{text}`: a config holds values, it cannot name code to run or read the environment"
            )
        return Choice(Kind.hydra, text.lstrip("+") if "/" in key else f"++{text.lstrip('+')}", key, False)

    def _find_recipes(self, values: Iterable[Any], place: str) -> list[str]:
        """The names of the recipes that `values` choose by name or by path."""
        names: list[str] = []
        for value in _flat(values):
            try:
                found = discovery.find(str(value))
            except ConfigError as error:
                raise ConfigError(f"{place}: {error}") from error
            if found.name in names and self.paths[found.name].resolve() != found.path.resolve():
                raise ConfigError(f"{place}: two recipes are called {found.name}; rename one of them")
            if not all(letter.isalnum() or letter in "_-." for letter in found.name):
                raise ConfigError(
                    f"{place}: rename {found.path}: a recipe's name has letters, digits, `_`, `-` and `.`"
                )
            self.paths[found.name] = found.path
            names.append(found.name)
        return names

    def _find_options(self, group: str, values: Iterable[Any], place: str) -> list[str]:
        """The options of `group` that `values` name."""
        known, options = self.groups[group], list(_flat(values))
        for option in options:
            if not isinstance(option, str):
                raise ConfigError(
                    f"{place}: `{group}` is a config group: {group}=NAME with one of {', '.join(known)}; "
                    "its keys are set one by one"
                )
            if option not in known:
                raise ConfigError(
                    f"{place}: the config group `{group}` has no `{option}`{did_you_mean(option, known)}"
                )
        return options

    def _why_unreadable(self, text: str, error: HydraException) -> str:
        if "=" not in text:
            if text in self.paths or Path(text).suffix == ".yaml":
                return f"`{text}` is a {'recipe' if text in self.paths else 'file'}: write +recipe={text}"
            return f"`{text}` is neither a command of fxtune nor key=value"
        key, _, value = text.partition("=")
        reason = str(error).strip().split("\n", 1)[0]
        quoted = f"\"{key}='{value}'\""
        return f"`{text}` cannot be read ({reason}). Quote the value twice, for the shell and for Hydra: {quoted}"


def refuse(problems: Iterable[str]) -> None:
    """Raise one ConfigError that lists all `problems`, each once, if there are any."""
    if unique := list(dict.fromkeys(problems)):
        raise ConfigError("\n".join(unique))


def _values(parsed: Override, names: Iterable[str]) -> list[Any]:
    """Each value that an override can take: one, or those of a sweep. A glob chooses from `names`."""
    value = parsed.value()
    if isinstance(value, ChoiceSweep):
        return [Override._convert_value(item) for item in value.list]
    if isinstance(value, RangeSweep):
        return list(value.range())
    if isinstance(value, Glob):
        return value.filter(list(names))
    return [] if parsed.is_sweep_override() else [value]  # a sweeper plugin draws from an interval


def _flat(values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        yield from value if isinstance(value, list) else [value]
