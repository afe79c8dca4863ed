"""Makes one typed config from recipes and the command line.

`prepare` checks the command line and every recipe and group that it names. Hydra composes them once. `typed` validates
the merged result once and returns dataclasses. Only sweep() hands out a DictConfig. The precedence, lowest first:

    defaults of the dataclasses < `defaults:` of the recipe < the recipe < groups < keys of the command line
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hydra import initialize
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fxtune.checkpoint.run_folder import read_config, read_objective, read_template_time, read_trained_tokens
from fxtune.config import discovery
from fxtune.config.introspection import Slot, all_keys
from fxtune.config.needs import unread
from fxtune.config.overrides import COMMAND_LINE, Choice, ChoiceKind, RecipeStore, refuse
from fxtune.config.root import Config, completed
from fxtune.config.validate import TASK_FOLDER, Validator, command_line_only
from fxtune.errors import ConfigError
from fxtune.facts.options import AUTO

_ROOT = "train"
"""Name of the primary config: configs/train.yaml."""
_CHECKED_JOBS = 20
"""Number of jobs of a multirun that are checked before the first job starts. Each check takes 0.1 s."""


def load(overrides: list[str]) -> Config:
    """The config of a command line: `load(["+recipe=quickstart", "optimizer.lr=1e-4"])`. Raises ConfigError."""
    return typed(_composed([choice.text for choice in prepare(overrides)]))


def prepare(overrides: list[str], multirun: bool = False, register_all: bool = False) -> list[Choice]:
    """Check `overrides` and every recipe and group that they name, and register these recipes and groups with Hydra.
    `register_all`: register all others, too, so that they can be listed. Returns the choices in Hydra's spelling and
    order: recipes, groups, keys.

    Raises one ConfigError that lists every mistake.
    """
    store, choices, problems = RecipeStore(Config), list[Choice](), []
    for text in overrides:
        try:
            choice = store.override(text)
            if choice.sweeps and not multirun:
                raise ConfigError(
                    f"{COMMAND_LINE}: `{text}` is more than one value. Add -m for one run each, "
                    "or write [a,b] for a list, or quote a text that has commas"
                )
            for name in choice.names:
                _ = store.recipe(name) if choice.kind is ChoiceKind.recipe else store.group(choice.key, name)
            choices.append(choice)
        except ConfigError as error:
            problems.append(str(error))
    chosen = [choice.key for choice in choices if choice.kind in (ChoiceKind.recipe, ChoiceKind.group)]
    # Of two bundles of techniques the last counts, so a script may append one.
    for key in sorted({key for key in chosen if chosen.count(key) > 1} - {"techniques"}):
        joined = "; +recipe=[a,b] joins recipes" if key == "recipe" else ""
        problems.append(f"{COMMAND_LINE}: `{key}` is chosen {chosen.count(key)} times: keep one{joined}")
    refuse(problems)
    if multirun:  # the recipes' grids apply, except for keys that the command line sets
        set_here = {choice.key for choice in choices}
        choices += [choice for choice in store.grid if choice.key not in set_here]
    for choice in choices:
        if choice.kind is ChoiceKind.group:
            store.leave_out(choice.key)
        store.add_entry(choice.key)
    _register(store, register_all)
    return sorted(choices, key=lambda choice: choice.kind.value)


def typed(cfg: DictConfig) -> Config:
    """The composed config as dataclasses. Raises one ConfigError for all keys that are unknown, unset or wrong."""
    validator = Validator(Config, lambda _: "in the config", from_file=False)
    try:
        values = OmegaConf.to_container(cfg, enum_to_str=True)
        validator.check(Slot(Config), values, ())
        refuse(validator.problems)  # also refuses a pointer to the environment, before anything resolves it
        resolved = OmegaConf.to_container(cfg, resolve=True, enum_to_str=True)
        if resolved != values:
            validator.check(Slot(Config), resolved, ())
            refuse(validator.problems)
        merged = OmegaConf.merge(_schema(), cfg)
        missing = sorted(re.sub(r"\[(\d+)\]", r".\1", key) for key in OmegaConf.missing_keys(merged))
        refuse(f"`{key}` is not set (???); give it: {key}=VALUE" for key in missing)
        config = OmegaConf.to_object(merged)
    except (OmegaConfBaseException, RecursionError) as error:  # RecursionError: keys that point at each other
        raise ConfigError(_message(error)) from error
    assert isinstance(config, Config)
    if form := config.objective.needs.row_format:
        config.data = config.data.with_format(form)
    refuse([*unread(config), *config.refusals()])
    return config


def of_run(folder: Path, trust_remote_code: bool = False, overrides: Sequence[str] = ()) -> Config:
    """The config of the run in `folder`, changed by `overrides`, the keys of a command line. A stranger may have
    written the folder: its config may run code only with `trust_remote_code`, and its output folders are ignored.
    Raises ConfigError if the folder holds no run, or if a key is wrong."""
    values = read_config(folder)
    if values is None:
        raise ConfigError(f"{folder} holds no run: it has no config.yaml.")
    values = completed(values)
    values["objective"] |= read_objective(folder)
    cfg, choices = OmegaConf.create(values), prepare(list(overrides))
    for choice in choices:
        if choice.kind is not ChoiceKind.key:
            raise ConfigError(f"{COMMAND_LINE}: `{choice.text}`: beside a run only keys can be set, one by one")
        _check_indices([choice.text], cfg)
        value = OverridesParser.create().parse_override(choice.text).value()
        OmegaConf.update(cfg, choice.key, value, merge=False, force_add=True)
    config = typed(cfg)
    if not trust_remote_code and (config.model.trust_remote_code or config.techniques.attention.trust_remote_code):
        raise ConfigError(
            f"{folder / 'config.yaml'}: trust_remote_code runs code of a stranger, so a run folder cannot set it. If "
            "the run is yours, add --trust-remote-code."
        )
    config.run.dir = config.train.pause_after = None
    config.data.template_time = config.data.template_time or read_template_time(folder)
    if config.techniques.lora.train_tokens == AUTO:
        config.techniques.lora.train_tokens = read_trained_tokens(folder)
    if all(choice.key != "data.cache_dir" for choice in choices):
        config.data.cache_dir = None
    if not trust_remote_code and all(choice.key != TASK_FOLDER for choice in choices):
        config.eval.task_folder = None
    return config


def as_recipe(config: Config) -> tuple[dict[str, Any], list[str]]:
    """(the plain values of a recipe for `config`, the words of a command line for the keys that no recipe may set)."""
    values, words = json.loads(json.dumps(asdict(config))), list[str]()
    for key in filter(command_line_only, all_keys(Config)):
        *path, name = key.split(".")
        if value := functools.reduce(dict.__getitem__, path, values).pop(name):
            words.append(path_override(key, value))
    return values, words


def path_override(key: str, path: Path | str) -> str:
    """The override `key=path`, whatever characters the path has."""
    quoted = str(path).replace("\\", "\\\\").replace("'", "\\'")
    return f"{key}='{quoted}'"


def sweep(choices: list[Choice], job: Callable[[DictConfig, list[str]], None]) -> None:
    """Call `job(composed config, overrides of the job)` for each job of a multirun."""

    def task(cfg: DictConfig) -> None:
        job(cfg, list(HydraConfig.get().overrides.task))

    check_jobs(choices)
    with tempfile.TemporaryDirectory(prefix="fxtune-") as scratch, _session() as hydra:
        settings = [f"hydra.sweep.dir='{scratch}'", "hydra.mode=MULTIRUN"]  # Hydra writes a multirun.yaml to sweep.dir
        hydra.multirun(_ROOT, task, [*(choice.text for choice in choices), *settings])


def check_jobs(choices: list[Choice]) -> None:
    """Compose and validate the first 20 jobs of a multirun, so that a mistake shows at once and not after hours."""
    values: dict[str, list[str]] = {}
    for parsed in OverridesParser.create().parse_overrides([choice.text for choice in choices]):
        if parsed.is_sweep_override() and not parsed.is_discrete_sweep():
            continue  # a sweeper plugin draws the values later
        key = parsed.get_key_element()
        texts = parsed.sweep_string_iterator() if parsed.is_sweep_override() else [parsed.get_value_element_as_str()]
        values[key] = [f"{key}={text}" for text in texts]
    for job in itertools.islice(itertools.product(*values.values()), _CHECKED_JOBS):
        typed(_composed(list(job)))


def inspect(choices: list[Choice], cfg: str | None, info: str | None, package: str | None, resolve: bool) -> str:
    """The text of `--cfg` (the composed config, or only its key `package`), or of `--info` (how it was composed)."""
    texts = [choice.text for choice in choices]
    with _session() as hydra, contextlib.redirect_stdout(io.StringIO()) as printed:
        if cfg:
            hydra.show_cfg(_ROOT, texts, cfg, package, resolve)
        else:
            hydra.show_info(info, _ROOT, texts)
    return printed.getvalue()


def complete(arguments: list[str]) -> None:
    """Print Hydra's shell completion: `install=bash`, or `query=bash` with the line in COMP_LINE."""
    with _session() as hydra:
        hydra.shell_completion(_ROOT, arguments)


@functools.cache
def _schema() -> DictConfig:
    """Config as an OmegaConf schema. Making it takes 50 ms, so all callers share one schema. Do not change it."""
    schema = OmegaConf.structured(Config)
    assert isinstance(schema, DictConfig)
    return schema


def _register(store: RecipeStore, everything: bool) -> None:
    """Give Hydra the schema and the checked recipes and groups by name, so that Hydra reads no file itself."""
    if everything:
        for group, options in store.groups.items():
            for option in options:
                store.group(group, option)
        for name in store.paths:
            with contextlib.suppress(ConfigError):  # a broken recipe that nobody chose must not stop the others
                store.recipe(name)
    known = ConfigStore.instance()
    for group in ("recipe", *store.groups):
        known.repo.pop(group, None)
    _register_root()
    for (group, option), (data, whole_config) in store.options.items():
        package = "_global_" if whole_config else None
        known.store(group=group, name=option, node=OmegaConf.create(data), package=package)
    for name, node in store.recipes.items():
        known.store(group="recipe", name=name, node=node, package="_global_")


@functools.cache
def _register_root() -> None:
    """Give Hydra the schema and configs/train.yaml. Hydra copies the schema."""
    known = ConfigStore.instance()
    known.store(name="schema", node=_schema())
    known.store(name=_ROOT, node=OmegaConf.load(discovery.shipped("configs") / f"{_ROOT}.yaml"))


@contextlib.contextmanager
def _session() -> Iterator[Any]:
    """A context manager that yields Hydra with all that prepare() registered. Errors of Hydra become ConfigErrors.
    Hydra has one global instance. If it exists already, it is put aside, because `fxtune tune` composes a config
    inside a job of a multirun."""
    instance = GlobalHydra.instance()
    outer, instance.hydra = instance.hydra, None
    try:
        with initialize(version_base="1.3", config_path=None):
            yield instance.hydra
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"{COMMAND_LINE}: {_message(error)}") from error
    finally:
        instance.hydra = outer


def _composed(overrides: list[str]) -> DictConfig:
    """The config that Hydra composes from the texts of `prepare`, without Hydra's own section. Raises ConfigError."""
    with _session() as hydra:
        compose = functools.partial(hydra.compose_config, _ROOT, run_mode=RunMode.RUN, from_shell=False)
        try:
            cfg = compose(overrides)
        except (HydraException, OmegaConfBaseException):
            indexed = [text for text in overrides if re.match(r"[+\w.]*\.\d+[.=]", text)]
            if indexed:
                _check_indices(indexed, compose([text for text in overrides if text not in indexed]))
            raise
    # prepare() refuses all of these settings. If one ever comes through, Hydra must not act on it.
    if cfg.hydra.callbacks or cfg.hydra.searchpath or cfg.hydra.job.env_set or cfg.hydra.job.env_copy:
        raise ConfigError("the composed config sets hydra.callbacks, searchpath or env: refused")
    return OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])


def _check_indices(overrides: list[str], cfg: DictConfig) -> None:
    """Refuse `data.sources.3.path=x` if the recipe has only two sources."""
    for text in overrides:
        key = text.lstrip("+").partition("=")[0]
        name, index = re.match(r"(.*?)(?:\.(\d+)(?:\.|$)|$)", key).groups()  # type: ignore[union-attr]
        entries = OmegaConf.select(cfg, name)
        if index and int(index) >= len(entries):
            raise ConfigError(
                f"{COMMAND_LINE}: `{key}`: {name} has {len(entries)} here, counted from 0. "
                f"Give the whole list: '{name}=[{{path: a}},{{path: b}}]'"
            )


def _message(error: BaseException) -> str:
    """An error of Hydra or OmegaConf in one line, with the key."""
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    key = getattr(cause, "full_key", None)
    line = str(cause).strip().split("\n", 1)[0] or type(cause).__name__
    return f"`{key}`: {line}" if key else line
