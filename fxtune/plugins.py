"""Plugins: a user's row formats, objectives, metrics, rewards, environments and techniques. They have the same
interfaces as fxtune's own.

    import fxtune

    @fxtune.row_format("tickets")
    def read(row):
        return {"prompt": row["question"], "completion": row["reply"]}

A plugin is a Python file that the command line names (`--plugin tickets.py`), or an installed package with an entry
point in the group `fxtune.plugins`. A recipe can name what a plugin registers, but it cannot load a plugin. A registry
holds fxtune's own names and the names that plugins add, so one lookup finds both. The registry of objectives is in
objectives/registry.py.

Plugins are loaded when a process looks up a name for the first time. An environment variable holds the files of the
command line, so ranks and workers find them, too.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import MethodType, ModuleType
from typing import Any, TypeVar

from fxtune.errors import ConfigError, UserError, did_you_mean, first_line

GROUP = "fxtune.plugins"
FILES = "FXTUNE_PLUGINS"
"""The environment variable with the files of the command line, separated as in PATH."""
DIGEST = "sha256 "
"""The beginning of the identity of a plugin that is a file."""
PLUGIN_ADDS = "A plugin adds others: --plugin FILE.py (docs/plugins.md)"
Value = TypeVar("Value")


@dataclass(frozen=True)
class Plugin:
    name: str
    """The name of the file without its ending, or the name of the entry point."""
    file: Path
    identity: str
    """The package and its version, or the sha256 of the file. A resumed run needs a plugin with the same identity."""

    def __str__(self) -> str:
        return f"{self.name} ({self.identity})"


@dataclass(frozen=True)
class Group:
    """Documents that stay together, for a row format to return: a preference, or a question with its candidates."""

    documents: Sequence[Mapping[str, Any]]
    """A row in one of fxtune's formats for each document, in the order in which an objective gets the documents."""
    labels: Sequence[float | None] | None = None
    """A number for each document, or None for a document without a label. None: the group has no labels."""

    def as_row(self) -> dict[str, Any]:
        """The same content as a row of format `group`."""
        row: dict[str, Any] = {"documents": [dict(document) for document in self.documents]}
        return row if self.labels is None else row | {"labels": list(self.labels)}


REGISTRIES: list[Registry[Any]] = []
"""All registries of the modules that are imported so far."""


class Registry(Mapping[str, Value]):
    """The names of one kind that recipes may use: fxtune's own, and the names that plugins add."""

    def __init__(self, kind: str, **ours: str) -> None:
        """`ours`: name -> "module:attribute". The module is imported when the name is looked up."""
        self.kind, self._ours = kind, ours
        self._reserved: set[str] = {*ours, "auto"}
        self._added: dict[str, tuple[Value, Plugin]] = {}
        REGISTRIES.append(self)

    def reserve(self, names: Iterable[str]) -> None:
        """Let no plugin register these names."""
        self._reserved.update(names)

    def add(self, name: str, value: Value) -> Value:
        """Register `value` for the plugin that is being loaded, and return it. Raises ConfigError."""
        plugin = _loading[-1] if _loading else None
        if plugin is None:
            raise ConfigError(
                f"The {self.kind} `{name}` is registered outside of a plugin, where no resumed run and no worker "
                "finds it. Write it to a file and give that: --plugin FILE, or fxtune.load_plugin(FILE)."
            )
        if not name.isidentifier():
            raise ConfigError(f"{plugin.file}: `{name}` is no name of a {self.kind}: letters, digits and _ only.")
        if name in self._reserved:
            raise ConfigError(f"{plugin.file}: fxtune has its own {self.kind} `{name}`. Choose another name.")
        if name in self._added:
            other = self._added[name][1]
            raise ConfigError(
                f"{plugin.file}: {other.file} has a {self.kind} `{name}`, too. Use one of the two plugins."
            )
        self._added[name] = (value, plugin)
        return value

    def __contains__(self, name: object) -> bool:
        return name in self._ours or name in self.added()

    def __iter__(self) -> Iterator[str]:
        yield from self._ours
        yield from self.added()

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __bool__(self) -> bool:
        return True

    def __getitem__(self, name: str) -> Value:
        """Raises ConfigError for an unknown name."""
        if name in self._ours:
            module, _, attribute = self._ours[name].partition(":")
            found: Value = getattr(importlib.import_module(module), attribute)
            return found
        if name not in self:
            raise ConfigError(self.unknown(name))
        return self._added[name][0]

    def added(self) -> dict[str, Plugin]:
        """The names that plugins have registered, each with its plugin."""
        load_all()
        return {name: plugin for name, (_, plugin) in self._added.items()}

    def unknown(self, name: str) -> str:
        """The message for a `name` that is not registered."""
        hint = did_you_mean(name, self) if [*self] else "."
        return f"there is no {self.kind} `{name}`{hint} {PLUGIN_ADDS}"

    def drop(self, plugin: Plugin) -> None:
        self._added = {name: one for name, one in self._added.items() if one[1] != plugin}


ROW_FORMATS: Registry[Callable[[dict[str, Any]], dict[str, Any] | Group]] = Registry("row format")
"""Functions: a row of the data -> a row in one of fxtune's formats (data/formats), or a group of documents."""
METRICS: Registry[Callable[[str, str], float]] = Registry("metric")
"""Functions: (the model's answer, the right answer) -> a number. The log has the mean over the questions."""
METRICS.reserve(["exact_match"])
REWARDS: Registry[Callable[..., Any]] = Registry(
    "reward",
    environment="fxtune.training.rollouts.reward_functions:of_environment",
    exact="fxtune.training.rollouts.reward_functions:exact",
    json="fxtune.training.rollouts.reward_functions:json_document",
    length="fxtune.training.rollouts.reward_functions:length",
    math="fxtune.training.rollouts.reward_functions:equal_expression",
    number="fxtune.training.rollouts.reward_functions:number",
    regex="fxtune.training.rollouts.reward_functions:regex",
    tags="fxtune.training.rollouts.reward_functions:tags",
    verifiers="fxtune.training.rollouts.taskset:taskset_reward",
)
"""Functions with TRL's signature: f(prompts, completions, completion_ids, **columns) -> a number or None for each
completion. Options of a recipe are keywords, too. A reward of fxtune gets its columns in one argument, `columns`, so
that a column may have the name of an option."""
REWARD_ARGUMENTS = {"prompts", "completions", "completion_ids", "columns", "environments", "log_extra", "log_metric"}
"""Arguments of a reward that are neither columns of rows nor options."""
ENVIRONMENTS: Registry[type] = Registry("environment")
"""Classes with TRL's interface: reset(**row), methods that the model calls as tools, and get_reward()."""
TECHNIQUES: Registry[type] = Registry("technique of a plugin")
"""Dataclasses that derive from Technique (techniques/base.py)."""

_loading: list[Plugin] = []
_loaded: dict[str, Plugin] = {}
_installed: list[bool] = []
"""Not empty once the entry points were loaded."""


def row_format(name: str) -> Callable[[Any], Any]:
    """Register a function (row of the data) -> row in one of fxtune's formats, or Group of such rows:
    `data.sources.0.format=NAME`."""
    return lambda function: ROW_FORMATS.add(name, _guarded(function))


def place_of(value: object) -> Path | str:
    """The place where `value` is defined: the file of the plugin that is being loaded, or else a module's name."""
    return _loading[-1].file if _loading else getattr(value, "__module__", "a plugin")


def metric(name: str) -> Callable[[Any], Any]:
    """Register a function (answer, right answer) -> number for `data.questions.metrics=[NAME]`."""
    return lambda function: METRICS.add(name, _guarded(function))


def reward(name: str) -> Callable[[Any], Any]:
    """Register a function with TRL's signature for `objective.rewards=[{name: NAME}]` (docs/rl.md)."""
    return lambda function: REWARDS.add(name, function)


def environment(name: str) -> Callable[[Any], Any]:
    """Register a class whose public methods are tools: `data.sources.0.environment=NAME` (docs/rl.md)."""
    return lambda kind: ENVIRONMENTS.add(name, kind)


def tools_of(kind: type) -> dict[str, Callable[..., Any]]:
    """{name: method} of the methods of an environment that the model may call."""
    methods = inspect.getmembers(kind, inspect.isfunction)
    return {name: method for name, method in methods if name[0] != "_" and name not in ("reset", "get_reward")}


def tool_schemas(name: str) -> list[dict[str, Any]]:
    """The JSON schemas of an environment's tools. Raises ConfigError."""
    from transformers.utils import get_json_schema

    kind, plugin = ENVIRONMENTS[name], ENVIRONMENTS.added()[name]
    with _blamed(plugin):
        return [get_json_schema(MethodType(tool, kind)) for tool in tools_of(kind).values()]


def reward_problem(name: str, options: Mapping[str, Any]) -> str:
    """Why a reward of fxtune cannot have these options, or lacks a package; empty if nothing is wrong. The reward is
    called without answers, so it also imports its packages. A reward of a plugin is not called."""
    if name in REWARDS.added():
        return ""
    column = inspect.signature(REWARDS[name]).parameters.get("column")
    try:
        columns = {options.get("column", column.default): list[Any]()} if column else {}
        REWARDS[name](prompts=[], completions=[], completion_ids=[], columns=columns, **options)
    except (TypeError, ValueError, re.error) as error:
        return f"objective.rewards: {name}: {error}."
    return ""


def technique(name: str) -> Callable[[Any], Any]:
    """Register a dataclass that derives from fxtune.Technique: `techniques.plugins.use.NAME={...}`."""
    return lambda kind: TECHNIQUES.add(name, guarded_class(kind))


def require_unchanged(plugin: Plugin) -> None:
    """Raise ConfigError if the file of a plugin was edited since it was loaded. Other processes would load the new
    file."""
    if not plugin.identity.startswith(DIGEST):
        return
    try:
        same = plugin.identity == _identity(plugin.file.read_bytes())
    except OSError:
        same = False
    if not same:
        raise ConfigError(f"The plugin {plugin.file} was edited while it was used. Give the same command again.")


def _identity(source: bytes) -> str:
    return f"{DIGEST}{hashlib.sha256(source).hexdigest()[:16]}"


@contextmanager
def files_used(files: Sequence[str | Path]) -> Iterator[None]:
    """A context manager that loads these plugins for its body and for the processes that the body starts. Raises
    ConfigError."""
    before = os.environ.get(FILES)
    given = [path for path in (before or "").split(os.pathsep) if path] + [str(Path(file).resolve()) for file in files]
    mine: list[Plugin] = []
    try:
        for file in files:
            mine.append(load_file(Path(file)))
        if files:
            os.environ[FILES] = os.pathsep.join(dict.fromkeys(given))
        yield
    finally:
        for plugin in mine:
            _drop(plugin)
        if before is None:
            os.environ.pop(FILES, None)
        else:
            os.environ[FILES] = before


def load_plugin(file: str | Path) -> None:
    """Load a plugin for the rest of this process and for the processes that it starts. Raises ConfigError."""
    plugin = load_file(Path(file))
    paths = os.environ.get(FILES, "").split(os.pathsep)
    os.environ[FILES] = os.pathsep.join(dict.fromkeys([*filter(None, paths), str(plugin.file)]))


def load_all() -> None:
    """Load the installed plugins and the files of the command line, unless this process has them. Raises
    ConfigError."""
    if _loading:  # a plugin that is being loaded looks up a name
        return
    for path in filter(None, os.environ.get(FILES, "").split(os.pathsep)):
        if not any(plugin.file == Path(path) for plugin in _loaded.values()):
            load_file(Path(path))
    if not _installed:
        for point in metadata.entry_points(group=GROUP):
            spec = importlib.util.find_spec(point.module.partition(".")[0])
            file = Path(spec.origin) if spec and spec.origin else Path(point.module)
            version = f"{point.dist.name} {point.dist.version}" if point.dist else point.module
            _load(Plugin(point.name, file, version), point.load)
        _installed.append(True)


def load_file(path: Path) -> Plugin:
    """Run the file of a plugin, which registers the plugin's parts. Raises ConfigError with the file and the line."""
    file = path.expanduser().resolve()
    try:
        source = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"--plugin {path}: {error.strerror or error}. Give the Python file of a plugin.") from error
    if file.suffix != ".py" or os.pathsep in str(file):
        raise ConfigError(f"--plugin {path}: a plugin is a Python file: NAME.py, with no `{os.pathsep}` in its path.")
    plugin = Plugin(file.stem, file, _identity(source))

    def run() -> None:
        module = ModuleType(f"fxtune_plugin_{file.stem}")
        module.__file__ = str(file)
        sys.modules[module.__name__] = module  # dataclasses look their module up
        exec(compile(source, str(file), "exec"), module.__dict__)

    _load(plugin, run)
    return plugin


def _load(plugin: Plugin, run: Callable[[], object]) -> None:
    other = _loaded.get(plugin.name)
    if other is not None and other.file == plugin.file and other != plugin:  # the file was edited while a notebook ran
        _drop(other)
        other = None
    if other is not None and other != plugin:
        raise ConfigError(
            f"Two plugins have the name `{plugin.name}`: {other.file} and {plugin.file}. Use one of them."
        )
    if other is not None:
        return
    before = sum(len(registry._added) for registry in REGISTRIES)
    _loading.append(plugin)
    try:
        with _blamed(plugin):
            run()
        if sum(len(registry._added) for registry in REGISTRIES) == before:
            names = "row_format, objective, metric, reward, environment or technique"
            raise ConfigError(f"The plugin {plugin.file} registers nothing: it needs a {names} of fxtune.")
    except BaseException:
        _drop(plugin)
        raise
    finally:
        _loading.pop()
    _loaded[plugin.name] = plugin


def _drop(plugin: Plugin) -> None:
    for registry in REGISTRIES:
        registry.drop(plugin)
    _loaded.pop(plugin.name, None)


def summary() -> str:
    """A line for each name that a plugin has registered; empty without plugins."""
    lines = [
        f"  {registry.kind.removesuffix(' of a plugin')} {name}: {plugin}"
        for registry in REGISTRIES
        for name, plugin in registry.added().items()
    ]
    return "from plugins\n" + "\n".join(lines) if lines else ""


@contextmanager
def _blamed(plugin: Plugin) -> Iterator[None]:
    """A context manager that turns an error of its body into one message with the plugin's file and line. fxtune's own
    errors stay the same, and so do errors because memory ran out, which is not the plugin's fault."""
    from fxtune.system.process.oom import out_of_memory_reason

    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if out_of_memory_reason(error):
            raise
        raise ConfigError(f"The plugin {plugin.file}{_line(plugin, error)}: {first_line(error)}.") from error


def _line(plugin: Plugin, error: BaseException) -> str:
    if isinstance(error, SyntaxError) and error.filename == str(plugin.file):
        return f", line {error.lineno}"
    own = plugin.file.parent if plugin.file.name == "__init__.py" else plugin.file
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if Path(frame.filename) == own or own in Path(frame.filename).parents]
    if not inside:
        return ""
    where = f" ({inside[-1].filename})" if inside[-1].filename != str(plugin.file) else ""
    return f", line {inside[-1].lineno}{where}"


def _guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `function` so that its errors name the file and line of the plugin that is being loaded."""
    plugin = _loading[-1] if _loading else None
    if plugin is None:
        return function
    if inspect.isgeneratorfunction(function):

        @functools.wraps(function)
        def generate(*args: Any, **kwargs: Any) -> Iterator[Any]:
            with _blamed(plugin):
                yield from function(*args, **kwargs)

        return generate

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _blamed(plugin):
            return function(*args, **kwargs)

    return call


def guarded_class(kind: type) -> type:
    for name, member in vars(kind).copy().items():
        if inspect.isfunction(member) and (name in ("__init__", "__post_init__") or not name.startswith("__")):
            setattr(kind, name, _guarded(member))
    return kind
