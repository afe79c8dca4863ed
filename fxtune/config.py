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
from dataclasses import dataclass, field
from enum import Enum
from typing import Optional

from hydra import compose, initialize
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fxtune import library
from fxtune.bounds import out_of_bounds
from fxtune.checkpoint import CheckpointConfig
from fxtune.data.loader import LoaderConfig
from fxtune.data.sources import DataConfig
from fxtune.errors import ConfigError
from fxtune.model import ModelConfig
from fxtune.overrides import COMMAND_LINE, Choice, Kind, Shelf, refuse
from fxtune.pipeline import Pipeline
from fxtune.schedule import ScheduleConfig
from fxtune.spikes import Spikes
from fxtune.tracking import TrackingConfig
from fxtune.update_rule import OptimizerConfig
from fxtune.vetting import Vetting
from fxtune.world import Device


class Resume(str, Enum):
    auto = "auto"
    never = "never"
    must = "must"


@dataclass
class RunConfig:
    name: str = "run"
    """Name of the run: its folder under runs/, its name in W&B. A recipe's own name by default."""
    dir: Optional[str] = None
    """The run's folder; null: runs/NAME, and runs/NAME-2 and so on when that one is taken."""
    seed: int = 0
    resume: Resume = Resume.auto
    """`auto`: go on with an unfinished run of the same config, else start; `never`: start; `must`: fail if there is none."""
    deterministic: bool = False
    """The same bits each time on the same machine: only kernels that give them, and nothing that is chosen by the clock or by the
    memory that happens to be free. What cannot is refused (docs/faults.md)."""
    device: Device = Device.auto
    memory_gib: Optional[float] = None
    """Let torch have at most this much of the GPU's memory, in GiB; null: all of it. As if the card were smaller."""


class OutOfMemory(str, Enum):
    halve = "halve"
    stop = "stop"


@dataclass
class TrainConfig:
    max_steps: Optional[int] = None
    """Optimizer steps. With epochs too, whichever comes first; with neither, one epoch."""
    epochs: Optional[float] = None
    micro_batch_size: int = 1
    """Rows in one forward and backward."""
    global_batch_size: int = 8
    """Rows in one optimizer step; a multiple of micro_batch_size."""
    eval_every: int = 0
    """Evaluate each time this many steps are done; 0: only at the end."""
    log_every: int = 1
    """Steps between two log lines. The only place where the loop waits for the device."""
    max_grad_norm: float = 1.0
    """Clip the gradient to this norm; 0: off."""
    max_skipped_steps: int = 5
    """Stop after this many steps in a row whose loss or gradient was not finite (none of them touches the weights). While
    float16 looks for its loss scale, steps are skipped and do not count here."""
    spikes: Spikes = Spikes.report
    """Steps whose loss is far above that of the steps before: `report` them with their samples, `skip` them too, so that they do
    not touch the weights (decided on the device), or `off`."""
    spike_window: int = 64
    """A spike is judged by the losses of this many steps before it, once there is a quarter of them."""
    spike_threshold: float = 8.0
    """A loss is a spike above their median by this many times their spread (1.4826 x the median absolute deviation)."""
    out_of_memory: OutOfMemory = OutOfMemory.halve
    """Where memory runs out in training, evaluation or answers. `halve`: half as many rows at once from there on; a step is taken
    again, with its global batch and its loss as they are. `stop`: an error."""


@dataclass
class Config:
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    techniques: Pipeline = field(default_factory=Pipeline)
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)


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
    shelf = Shelf(Config)
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


def _register(shelf: Shelf, everything: bool) -> None:
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
    store.store(name=ROOT, node=OmegaConf.load(library.shipped("configs") / f"{ROOT}.yaml"))
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
