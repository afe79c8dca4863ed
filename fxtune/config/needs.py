"""Keys that are read only beside another setting. A value that nothing would read is refused.

This is the list for all groups but `techniques`: what an option of a technique needs often depends on the model and
the machine, so `check()` of the technique says it. A key is refused where its value differs from the default, so a
config that was written out whole stays valid. tests/repository/test_keys.py changes every key of the schema and fails
for one that neither acts nor is refused.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from fxtune.config.root import Config, Spikes
from fxtune.data.config import Dedup
from fxtune.optim.config import READS, OptimizerName
from fxtune.optim.schedule import DECAYING, ScheduleName
from fxtune.tracking.tracker import WandbMode


@dataclass(frozen=True)
class Need:
    key: str
    setting: str
    """What the key is read with, as a user types it."""
    holds: Callable[[Config], bool]
    """Whether a config has this setting."""
    said: bool = False
    """Whether an unread key is named in a line of the run and not refused: a recipe keeps the options of a section
    that is switched off, and its eval_fraction where the command line names held-out data."""


def _names(members: Any) -> str:
    return ", ".join(member.value for member in members)


def _held_out_by_share(config: Config) -> bool:
    return any(config.data.held_out_shares) or not config.data.eval_sources


def _asks(config: Config) -> bool:
    return config.data.questions.path is not None


def _decays(config: Config) -> bool:
    return config.schedule.name in DECAYING


def _wsd(config: Config) -> bool:
    return config.schedule.name is ScheduleName.wsd


def _stops(config: Config) -> bool:
    return config.train.stop.patience > 0


def _detects_spikes(config: Config) -> bool:
    return config.train.spikes is not Spikes.off


def _tracks_in_wandb(config: Config) -> bool:
    return config.tracking.wandb.mode is not WandbMode.disabled


def _has_workers(config: Config) -> bool:
    return config.loader.num_workers != 0


def _read_by(option: str) -> Callable[[Config], bool]:
    return lambda config: option in READS[config.optimizer.name]


def _optimizer_option(option: str) -> Need:
    readers = [name for name in OptimizerName if option in READS[name]]
    return Need(f"optimizer.{option}", f"optimizer.name={_names(readers).replace(', ', '|')}", _read_by(option))


_HELD_OUT = "data.eval_fraction, or eval_fraction of a source"
_QUESTIONS = "data.questions.path"
_PATIENCE = "train.stop.patience"
_SPIKES = f"train.spikes={Spikes.report.value}|{Spikes.skip.value}"
_WANDB = "tracking.wandb.mode=auto|online|offline"
_WORKERS = "loader.num_workers above 0"

NEEDS = (
    Need("data.eval_fraction", "data.eval_sources=[]", lambda config: not config.data.eval_sources, said=True),
    Need("data.eval_limit", _HELD_OUT, lambda config: config.data.holds_out),
    Need("data.eval_limit", _HELD_OUT, _held_out_by_share, said=True),
    *(
        Need(f"data.questions.{option}", _QUESTIONS, _asks, said=True)
        for option in ("limit", "show", "max_new_tokens", "batch_size", "metrics")
    ),
    Need("data.mix.threshold", "data.mix.long_share", lambda config: config.data.mix.long_share is not None),
    Need("data.dedup_similarity", "data.dedup=near", lambda config: config.data.dedup is Dedup.near),
    Need(
        "data.on_overlap",
        "data.eval_sources or data.questions.path",
        lambda config: bool(config.data.eval_sources) or _asks(config),
    ),
    Need(
        "train.eval_share",
        "train.eval_every or train.stop.patience",
        lambda config: config.train.eval_every > 0 or _stops(config),
    ),
    Need("train.stop.min_delta", _PATIENCE, _stops),
    Need("train.stop.metric", _PATIENCE, _stops),
    Need("train.spike_window", _SPIKES, _detects_spikes),
    Need("train.spike_threshold", _SPIKES, _detects_spikes),
    *map(_optimizer_option, ("betas", "eps", "momentum", "fused")),
    Need(
        "optimizer.fused",
        "optimizer.stochastic_rounding=false",
        lambda config: not config.optimizer.stochastic_rounding,
    ),
    Need("schedule.warmup_ratio", "schedule.warmup_steps=0", lambda config: not config.schedule.warmup_steps),
    Need("schedule.min_lr_ratio", f"schedule.name={_names(DECAYING).replace(', ', '|')}", _decays),
    Need("schedule.decay_steps", "schedule.name=wsd", _wsd),
    Need("schedule.decay_ratio", "schedule.name=wsd", _wsd),
    Need("schedule.decay_ratio", "schedule.decay_steps=0", lambda config: not config.schedule.decay_steps),
    Need(
        "parallel.powersgd_start", "parallel.powersgd_rank above 0", lambda config: config.parallel.powersgd_rank > 0
    ),
    Need("loader.persistent_workers", _WORKERS, _has_workers),
    Need("loader.prefetch_factor", _WORKERS, _has_workers),
    *(
        Need(f"tracking.wandb.{option}", _WANDB, _tracks_in_wandb, said=True)
        for option in ("project", "entity", "group", "tags", "init_timeout")
    ),
)


def unread(config: Config) -> Iterator[str]:
    """Yield each key whose value nothing reads in `config`, worded as what to change."""
    for need, value, own in _unmet(config):
        if not need.said:
            yield (
                f"`{need.key}={_typed(value)}` is not read without {need.setting}: set that, too, or put "
                f"{need.key} back to its default, {_typed(own)}"
            )


def said_unread(config: Config) -> Iterator[str]:
    """Yield a line for each key that nothing reads and that is not refused."""
    for need, value, _ in _unmet(config):
        if need.said:
            yield f"{need.key}={_typed(value)} has no effect without {need.setting}"


def _unmet(config: Config) -> Iterator[tuple[Need, Any, Any]]:
    """Yield each need that `config` has and does not meet, with the value of its key and the default."""
    default = Config()
    for need in NEEDS:
        value, own = (operator.attrgetter(need.key)(one) for one in (config, default))
        if value != own and not need.holds(config):
            yield need, value, own


def _typed(value: Any) -> str:
    """A value as a user types it."""
    if isinstance(value, list):
        return f"[{','.join(map(_typed, value))}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value.value if isinstance(value, Enum) else value)
