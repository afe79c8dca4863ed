"""What a command line chooses and sets: vetted with Hydra's own grammar, given back in the one form that Hydra takes.

Hydra tells `key=`, `+key=` and `++key=` apart and takes the order of config groups from a file; a user wants neither. So
`Shelf.override` accepts each spelling, checks it against the dataclasses and the files that are there, and gives back the
spelling that works. `Shelf.recipe` lays a recipe over what its `defaults:` name. Floor 2: it knows the schema only as a type.
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
from fxtune.config.introspection import is_free
from fxtune.config.validate import Vetting
from fxtune.config.yaml_reader import Document, Keys, read
from fxtune.errors import ConfigError

COMMAND_LINE = "on the command line"


class Kind(Enum):
    """What an override does; also the order in which Hydra must see them, so that what is nearer to the user wins."""

    hydra = 0
    recipe = 1
    group = 2
    key = 3


@dataclass(frozen=True)
class Choice:
    """One vetted override."""

    kind: Kind
    text: str
    """As Hydra takes it."""
    key: str
    sweeps: bool
    names: tuple[str, ...] = ()
    """The recipes or options that it chooses, in any job of a sweep."""


class RecipeStore:
    """The recipes and groups that can be chosen here; those that were looked at stay, as plain data."""

    def __init__(self, schema: type):
        self.schema = schema
        self.groups = discovery.groups()
        self.paths = {name: recipe.path for name, recipe in discovery.recipes().items()}
        self.recipes: dict[str, DictConfig] = {}
        self.options: dict[tuple[str, str], tuple[dict[str, Any], bool]] = {}
        self.grid: list[Choice] = []
        """What the recipes that were looked at give as hydra.sweeper.params."""
        self._parser = OverridesParser.create()

    def override(self, text: str, place: str = COMMAND_LINE, stranger: bool = False) -> Choice:
        """Vet one override, which stands in `place`. Raises ConfigError with all that is wrong with it."""
        try:
            parsed = self._parser.parse_override(text)
        except HydraException as error:
            raise ConfigError(f"{place}: {self._unreadable(text, error)}") from error
        key, (_, _, raw) = parsed.key_or_group, text.partition("=")
        if parsed.is_delete():
            raise ConfigError(f"{place}: `{text}`: no key can be taken out of a config; give it another value")
        if parsed.package is not None:
            raise ConfigError(f"{place}: `{text}`: a group has one place, `@` cannot move it")
        sweeps = parsed.is_sweep_override()
        if key == "hydra" or key.startswith(("hydra.", "hydra/")):
            return self._hydra(text, key, place, stranger)
        if key == "recipe":
            names = self._recipes(parsed, place)
            listed = f"[{','.join(names)}]" if isinstance(parsed.value(), list) else ",".join(names)
            return Choice(Kind.recipe, f"+recipe={listed}", key, sweeps, tuple(names))
        if key in self.groups:
            options = self._options(key, _values(parsed, self.groups[key]), place)
            return Choice(Kind.group, f"+{key}={raw}", key, sweeps, tuple(options))
        vetting = Vetting(self.schema, lambda _: place, stranger)
        keys = tuple(key.split("."))
        if (
            len(keys) == 1
            and (group := discovery.nearest(key, [*self.groups, "recipe"], 0.75))
            and key not in vetting.sections
        ):
            raise ConfigError(
                f"{place}: unknown key `{key}`; did you mean `{'+' * (group == 'recipe')}{group}={raw}`?"
            )
        hint = vetting.key(keys)
        if hint is not None:
            for value in _values(parsed, ()):
                vetting.value(hint, value, keys)
        refuse(vetting.problems)
        return Choice(Kind.key, f"++{key}={raw}" if is_free(self.schema, keys) else f"{key}={raw}", key, sweeps)

    def recipe(self, name: str, trail: tuple[str, ...] = ()) -> DictConfig:
        """The recipe as plain data, laid over what its `defaults:` name. Raises ConfigError with all that is wrong in it."""
        if name in trail:
            raise ConfigError(
                f"{discovery.place(self.paths[name])}: the recipes {' -> '.join((*trail, name))} build on each other"
            )
        if name not in self.recipes:
            document = read(self.paths[name])
            vetting = Vetting(self.schema, document.where)
            if document.package not in (None, "_global_"):
                vetting.add((), f"a recipe's header is `# @package _global_`, not `{document.package}`")
            own = {key: value for key, value in document.data.items() if key not in ("defaults", "hydra")}
            vetting.value(self.schema, own, ())
            layers = self._defaults(document, vetting, (*trail, name))
            self.grid += self._grid(document, vetting)
            refuse(vetting.problems)
            own = {"run": {"name": name}, **own, **({"run": {"name": name, **own["run"]}} if own.get("run") else {})}
            # a recipe is laid over what it builds on, wherever (and whether) its defaults say _self_
            self.recipes[name] = OmegaConf.merge(*layers, own)  # type: ignore[assignment]
        return self.recipes[name]

    def group(self, group: str, option: str) -> tuple[dict[str, Any], bool]:
        """An option's values, and whether they are keys of the whole config (and not of the section named like the group)."""
        if (group, option) not in self.options:
            document = read(self.groups[group][option])
            everywhere = document.package == "_global_"
            prefix: Keys = () if everywhere else (group,)
            document.lines = {(*prefix, *keys): line for keys, line in document.lines.items()}
            vetting = Vetting(self.schema, document.where)
            hint = vetting.key(prefix)
            if hint is not None:
                vetting.value(hint, document.data, prefix)
            refuse(vetting.problems)
            self.options[group, option] = document.data, everywhere
        return self.options[group, option]

    def _defaults(self, document: Document, vetting: Vetting, trail: tuple[str, ...]) -> list[Any]:
        """What a recipe builds on, in order: other recipes (`- llama_lora`), groups (`- override /optimizer: muon`)."""
        entries = document.data.get("defaults") or []
        if not isinstance(entries, list):
            vetting.add(("defaults",), "`defaults` is a list: [llama_lora, {override /optimizer: muon}, _self_]")
            return []
        layers: list[Any] = []
        for index, entry in enumerate(entries):
            keys = ("defaults", str(index))
            try:
                layers += self._default(entry, document.where(keys), trail)
            except ConfigError as error:
                vetting.problems.append(str(error))
        return layers

    def _default(self, entry: Any, place: str, trail: tuple[str, ...]) -> list[Any]:
        if entry == "_self_":
            return []
        if isinstance(entry, str):
            if entry not in self.paths:
                raise ConfigError(
                    f"{place}: there is no recipe `{entry}` to build on{discovery.did_you_mean(entry, self.paths)}"
                )
            return [self.recipe(entry, trail)]
        if not isinstance(entry, dict) or len(entry) != 1:
            raise ConfigError(
                f"{place}: an entry of `defaults` is a recipe's name, `override /GROUP: OPTION`, or _self_"
            )
        ((key, value),) = entry.items()
        group = str(key).removeprefix("override ").strip().lstrip("/")
        if group.startswith("hydra"):
            raise ConfigError(
                f"{place}: a recipe cannot choose `{group}`, a plugin is code; say {group}={value} on the command line"
            )
        if group not in self.groups:
            raise ConfigError(
                f"{place}: there is no config group `{group}`{discovery.did_you_mean(group, self.groups)}"
            )
        layers = []
        for option in self._options(group, [value], place):
            data, everywhere = self.group(group, option)
            layers.append(data if everywhere else {group: data})
        return layers

    def _grid(self, document: Document, vetting: Vetting) -> list[Choice]:
        """A recipe's grid for `-m`, the one thing that it may say to Hydra: the rest of `hydra` runs code or moves files."""
        hydra = document.data.get("hydra")
        if hydra is None:
            return []
        path: Keys = ("hydra",)
        for allowed in ("sweeper", "params"):
            for key in hydra if isinstance(hydra, dict) else [hydra]:
                if key != allowed or not isinstance(hydra, dict) or not isinstance(hydra[key], dict):
                    vetting.add(
                        (*path, str(key)),
                        f"`{'.'.join((*path, str(key)))}`: of Hydra's own settings a recipe may give "
                        "only hydra.sweeper.params, a grid for -m: a recipe may come from a stranger, "
                        "and the others run code or move files. Yours go on the command line",
                    )
                    return []
            hydra, path = hydra.get(allowed, {}), (*path, allowed)
        found = []
        for key, value in hydra.items():
            line = document.where((*path, str(key)))
            try:
                choice = self.override(f"{key}={value}", line, stranger=True)
                if choice.kind is Kind.recipe:
                    raise ConfigError(f"{line}: a recipe cannot sweep over recipes")
                found.append(choice)
            except ConfigError as error:
                vetting.problems.append(str(error))
        return found

    def _hydra(self, text: str, key: str, place: str, stranger: bool) -> Choice:
        """Sweepers and launchers are the user's to choose and to set; what moves or runs other things is refused."""
        if key.startswith(("hydra.run", "hydra.sweep.", "hydra.output_subdir", "hydra.job.chdir")):
            raise ConfigError(
                f"{place}: `{key}`: Hydra writes nothing here; run.dir=FOLDER is where a run goes "
                "(in a multirun, one folder a job below it)"
            )
        if stranger or not (
            key in ("hydra/sweeper", "hydra/launcher") or key.startswith(("hydra.sweeper.", "hydra.launcher."))
        ):
            raise ConfigError(
                f"{place}: `{key}`: of Hydra's own settings only sweeper and launcher can be set, and not by a recipe"
            )
        if "${" in text or any(part.startswith("_") for part in key.split(".")) or "_target_" in text:
            raise ConfigError(
                f"{place}: `{text}`: a config holds values, it cannot name code to run or read the environment"
            )
        return Choice(Kind.hydra, text.lstrip("+") if "/" in key else f"++{text.lstrip('+')}", key, False)

    def _recipes(self, parsed: Override, place: str) -> list[str]:
        names = []
        for value in _values(parsed, self.paths):
            for name in value if isinstance(value, list) else [value]:
                try:
                    found = discovery.find(str(name))
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

    def _options(self, group: str, values: Iterable[Any], place: str) -> list[str]:
        known, chosen = self.groups[group], []
        for value in values:
            for option in value if isinstance(value, list) else [value]:
                if not isinstance(option, str):
                    raise ConfigError(
                        f"{place}: `{group}` is a config group: {group}=NAME with one of {', '.join(known)}; "
                        f"its keys are set one by one"
                    )
                if option not in known:
                    raise ConfigError(
                        f"{place}: the config group `{group}` has no `{option}`{discovery.did_you_mean(option, known)}"
                    )
                chosen.append(option)
        return chosen

    def _unreadable(self, text: str, error: HydraException) -> str:
        if "=" not in text:
            if text in self.paths:
                return f"`{text}` is a recipe: write +recipe={text}"
            if Path(text).suffix == ".yaml":
                return f"`{text}` is a file: write +recipe={text}"
            return f"`{text}` is neither a word of fxtune nor key=value"
        key, _, value = text.partition("=")
        reason = str(error).strip().split("\n", 1)[0]
        return f"`{text}` cannot be read ({reason}). Quote the value twice, for the shell and for Hydra: \"{key}='{value}'\""


def refuse(problems: Iterable[str]) -> None:
    """Raise one ConfigError with all `problems`, each once; none: go on."""
    listed = list(dict.fromkeys(problems))
    if listed:
        raise ConfigError("\n".join(listed))


def given(text: str) -> Any:
    """The value of one override that Shelf.override() let through, as plain data."""
    value: Any = OverridesParser.create().parse_override(text).value()
    return Override._convert_value(value)


def _values(parsed: Override, names: Iterable[str]) -> list[Any]:
    """Each value that an override can take: one, or those of a sweep. `names` is what a glob chooses from."""
    value = parsed.value()
    if isinstance(value, ChoiceSweep):
        return [Override._convert_value(item) for item in value.list]
    if isinstance(value, RangeSweep):
        return list(value.range())
    if isinstance(value, Glob):
        return value.filter(list(names))
    return [] if parsed.is_sweep_override() else [value]  # an interval is drawn from by a sweeper plugin
