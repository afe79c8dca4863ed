"""The root config, and the way from YAML and the command line to it.

`Config` is the whole vocabulary of a recipe. `prepare` vets what the command line names and says, Hydra composes, `typed`
turns the result into these dataclasses, and past this file no DictConfig is seen. What is nearer to the user wins:

    the dataclasses' defaults < the recipe (after what its `defaults:` build on) < groups < keys of the command line
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from collections.abc import Iterator

from hydra import compose, initialize
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fxtune.config import discovery
from fxtune.config.bounds import out_of_bounds
from fxtune.config.overrides import COMMAND_LINE, Choice, Kind, RecipeStore, refuse
from fxtune.config.root import Config
from fxtune.config.validate import Vetting
from fxtune.errors import ConfigError

ROOT = "train"
"""Name of the primary config: configs/train.yaml."""
_PREVIEWED = 20
"""So many jobs of a multirun are checked before the first one starts; each costs 0.1 s."""


def load(overrides: list[str]) -> Config:
    """The config that a command line asks for: `load(["+recipe=quickstart", "optimizer.lr=1e-4"])`. Raises ConfigError."""
    return typed(composed([choice.text for choice in prepare(overrides)]))


@functools.cache
def _schema() -> DictConfig:
    """Config as OmegaConf has it, which takes 50 ms to make. Not to be changed."""
    schema = OmegaConf.structured(Config)
    assert isinstance(schema, DictConfig)
    return schema


def typed(cfg: DictConfig) -> Config:
    """The composed config as dataclasses. Raises one ConfigError that names every key that is unknown, unset or out of range."""
    vetting = Vetting(Config, lambda _: "in the config", stranger=False)
    vetting.value(Config, OmegaConf.to_container(cfg, resolve=False, enum_to_str=True), ())
    refuse(vetting.problems)
    try:
        merged = OmegaConf.merge(_schema(), cfg)  # merge() copies it: no key gets by that is not a field
        missing = sorted(re.sub(r"\[(\d+)\]", r".\1", key) for key in OmegaConf.missing_keys(merged))
        refuse(f"`{key}` is not set (???); give it: {key}=VALUE" for key in missing)
        config = OmegaConf.to_object(merged)
    except (OmegaConfBaseException, RecursionError) as error:  # keys that point at each other never end
        raise ConfigError(_words(error)) from error
    assert isinstance(config, Config)
    refuse(out_of_bounds(config))
    return config


def prepare(overrides: list[str], multirun: bool = False, everything: bool = False) -> list[Choice]:
    """Vet `overrides` with every recipe and group that they name, register those with Hydra, return what Hydra is to be told.

    After this `+recipe=` and `recipe=`, `+optimizer=` and `optimizer=`, `+key=` and `key=` mean the same, and recipes come
    before groups, groups before keys. `everything` also registers what was not chosen, for listing it. Raises one ConfigError
    that lists all that is wrong.
    """
    shelf = RecipeStore(Config)
    choices: list[Choice] = []
    problems = []
    for text in overrides:
        try:
            choice = shelf.override(text)
            if choice.sweeps and not multirun:
                raise ConfigError(
                    f"{COMMAND_LINE}: `{text}` is more than one value. Add -m for one run each, "
                    "or write [a,b] for a list, or quote a text that has commas"
                )
            for name in choice.names:
                _ = shelf.recipe(name) if choice.kind is Kind.recipe else shelf.group(choice.key, name)
            choices.append(choice)
        except ConfigError as error:
            problems.append(str(error))
    refuse(problems)
    if multirun:  # the grid of a recipe, where the command line does not say otherwise
        set_here = {choice.key for choice in choices}
        choices += [choice for choice in shelf.grid if choice.key not in set_here]
    _register(shelf, everything)
    return sorted(choices, key=lambda choice: choice.kind.value)


def _register(shelf: RecipeStore, everything: bool) -> None:
    """Give Hydra the schema and what was vetted, by name, so that any working directory serves.

    Hydra reads no file of its own accord: there is no search path.
    """
    if everything:
        for group, options in shelf.groups.items():
            for option in options:
                shelf.group(group, option)
        for name in shelf.paths:
            with contextlib.suppress(ConfigError):  # a broken recipe that nobody chose must not stop the others
                shelf.recipe(name)
    store = ConfigStore.instance()
    for group in ("recipe", *shelf.groups):
        store.repo.pop(group, None)
    store.store(name="schema", node=_schema())
    store.store(name=ROOT, node=OmegaConf.load(discovery.shipped("configs") / f"{ROOT}.yaml"))
    for (group, option), (data, everywhere) in shelf.options.items():
        store.store(group=group, name=option, node=OmegaConf.create(data), package="_global_" if everywhere else None)
    for name, node in shelf.recipes.items():
        store.store(group="recipe", name=name, node=node, package="_global_")


def check_jobs(choices: list[Choice]) -> None:
    """Compose and check each job of a multirun (the first 20), so that the last one's mistake does not show after hours."""
    values: dict[str, list[str]] = {}
    for parsed in OverridesParser.create().parse_overrides([choice.text for choice in choices]):
        if parsed.is_sweep_override() and not parsed.is_discrete_sweep():
            continue  # a sweeper plugin draws from it
        key = parsed.get_key_element()
        texts = parsed.sweep_string_iterator() if parsed.is_sweep_override() else [parsed.get_value_element_as_str()]
        values[key] = [f"{key}={text}" for text in texts]
    for job in itertools.islice(itertools.product(*values.values()), _PREVIEWED):
        typed(composed(list(job)))


def composed(overrides: list[str]) -> DictConfig:
    """What Hydra makes of overrides that `prepare` gave, without its own section. Raises ConfigError."""
    with _beside_a_job(), initialize(version_base="1.3", config_path=None):
        try:
            cfg = compose(ROOT, overrides, return_hydra_config=True)
        except (HydraException, OmegaConfBaseException) as error:
            for text in overrides:
                _check_index(text, overrides)
            raise ConfigError(f"{COMMAND_LINE}: {_words(error)}") from error
    # Vetting lets none of these through. If it ever does, Hydra must not act on them.
    if cfg.hydra.callbacks or cfg.hydra.searchpath or cfg.hydra.job.env_set or cfg.hydra.job.env_copy:
        raise ConfigError("the composed config sets hydra.callbacks, searchpath or env: refused")
    return OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])


@contextlib.contextmanager
def _beside_a_job() -> Iterator[None]:
    """Hydra composes for one at a time. Inside one of its jobs (fxtune tune composes what it writes) that one waits."""
    whole = GlobalHydra.instance()
    job, whole.hydra = whole.hydra, None
    try:
        yield
    finally:
        whole.hydra = job


def _check_index(text: str, overrides: list[str]) -> None:
    """`data.sources.3.path=x`, where the recipe has two sources, deserves better words than OmegaConf's."""
    key = text.lstrip("+").partition("=")[0]
    above = re.match(r"(.*?)\.(\d+)(?:\.|$)", key)
    if above is None:
        return
    entries = OmegaConf.select(
        compose(ROOT, [other for other in overrides if not re.match(r"[\w.]*\.\d+[.=]", other)]), above[1]
    )
    if int(above[2]) >= len(entries):
        raise ConfigError(
            f"{COMMAND_LINE}: `{key}`: {above[1]} has {len(entries)} here, counted from 0. "
            f"Give the whole list: '{above[1]}=[{{path: ...}}]'"
        )


def _words(error: BaseException) -> str:
    """What Hydra or OmegaConf complained of, in one line, with the key."""
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    key = getattr(cause, "full_key", None)
    line = str(cause).strip().split("\n", 1)[0] or type(cause).__name__
    return f"`{key}`: {line}" if key else line
