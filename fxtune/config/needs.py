"""Keys that are read only with another setting. A value that nothing would read is refused.

NEEDS lists the keys of all groups but `techniques`. Whether an option of a technique is read often depends on the
model and the machine, so the technique's `check()` refuses unread options. A key is refused only if its value differs
from the default, so that a config may write out all its defaults. tests/repository/test_keys.py changes every key of
the schema, and fails for a key that neither acts nor is refused.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from fxtune.config.root import Config, SamplerConfig
from fxtune.data.config import SourceConfig
from fxtune.optim.config import TRAITS


@dataclass(frozen=True)
class KeyNeed:
    """`key` is read only with `setting`."""

    key: str
    setting: str
    """The setting as a user types it: `KEY=VALUE|VALUE`. `KEY` alone is any value but null, zero and an empty list."""
    holds: Callable[[Config], bool] | None = None
    """A function that finds out whether a config has the setting, for a `setting` in prose. None: `setting` is keys
    and values."""
    warns: bool = False
    """Whether an unread key gets a line in the log instead of a refusal. The command line may make a recipe's keys
    useless: it switches off their section, holds out other data or none, or replaces a hub id by a folder."""

    def is_met(self, config: Config) -> bool:
        if self.holds is not None:
            return self.holds(config)
        return any(_is_set(config, setting) for setting in self.setting.split(" or "))


def _is_set(config: Config, setting: str) -> bool:
    key, _, values = setting.partition("=")
    value = operator.attrgetter(key)(config)
    return _override_text(value) in values.split("|") if values else bool(value)


def _optimizers_that_read(option: str) -> str:
    return "optimizer.name=" + "|".join(name.value for name, traits in TRAITS.items() if option in traits.reads)


def _has_other_sides(config: Config) -> bool:
    """Whether copies of one row may be both trained on and held out."""
    data = config.data
    return bool(data.eval_sources or data.questions.path) or len(set(data.held_out_shares)) > 1


def _has_answers(config: Config) -> bool:
    return config.objective.needs.answers_share_prompts


def _sampler_need(option: str) -> KeyNeed:
    setting, holds = "objective=policy", lambda _: True
    if option in ("ahead", "sleep", "request_seconds", "request_seeds"):
        setting, holds = "objective=policy and vLLM", lambda it: it.is_vllm
    elif option in ("venv", "arguments"):
        setting, holds = "objective=policy, sampler=vllm and no sampler.url", lambda it: it.is_vllm and not it.url
    elif option == "batch":
        setting, holds = "objective=policy and sampler.name=model", lambda it: not it.is_vllm
    return KeyNeed(f"sampler.{option}", setting, lambda it: it.objective.needs.rollouts and holds(it.sampler))


_QUESTION_OPTIONS = ("limit", "show", "max_new_tokens", "metrics")
_SHARE = "data.eval_fraction, or eval_fraction of a source"
_OTHER_SIDES = "data.eval_sources, data.questions.path, or sources that hold out different shares"
_WANDB_OPTIONS = ("project", "entity", "group", "tags", "init_timeout")

NEEDS = (
    KeyNeed("model.revision", "a hub id in model.path", lambda config: config.model.on_hub, warns=True),
    KeyNeed("data.eval_fraction", "data.eval_sources=[]", warns=True),
    KeyNeed("data.eval_limit", _SHARE, lambda config: any(config.data.held_out_shares), warns=True),
    *(KeyNeed(f"data.questions.{option}", "data.questions.path", warns=True) for option in _QUESTION_OPTIONS),
    *(KeyNeed(f"eval.{option}", "eval.tasks", warns=True) for option in ("task_folder", "limit", "chat_template")),
    KeyNeed("data.share_prompts", "an objective over answers to a prompt", _has_answers),
    *(_sampler_need(entry.name) for entry in fields(SamplerConfig) if entry.name != "turns"),
    KeyNeed("sampler.turns", "environment of a source", lambda config: config.data.has_tools),
    KeyNeed("data.mix.threshold", "data.mix.long_share"),
    KeyNeed("data.dedup_similarity", "data.dedup=near"),
    KeyNeed("data.on_overlap", _OTHER_SIDES, _has_other_sides, warns=True),
    KeyNeed("data.general", "held-out data or questions for a language model", lambda it: it.judges_text, warns=True),
    KeyNeed("refresh.forgotten", "data.general", warns=True),
    KeyNeed("train.eval_share", "train.eval_every or train.stop.patience"),
    KeyNeed("train.stop.min_delta", "train.stop.patience"),
    KeyNeed("train.stop.metric", "train.stop.patience"),
    *(KeyNeed(f"optimizer.{option}", _optimizers_that_read(option)) for option in ("betas", "eps", "momentum")),
    KeyNeed("schedule.min_lr_ratio", "schedule.name=cosine|linear|wsd"),
    KeyNeed("schedule.decay_steps", "schedule.name=wsd"),
    # A null counts as set, because it means two workers on a GPU.
    KeyNeed("loader.prefetch_factor", "loader.num_workers", lambda config: config.loader.num_workers != 0),
    *(
        KeyNeed(f"tracking.wandb.{option}", "tracking.wandb.mode=auto|online|offline", warns=True)
        for option in _WANDB_OPTIONS
    ),
)


def unread(config: Config) -> Iterator[str]:
    """Yield a message with what to change, for each unread key of `config` that is refused."""
    for need, value, default in _unmet(config):
        if not need.warns:
            yield (
                f"`{need.key}={_override_text(value)}` is not read without {need.setting}: set both, or put "
                f"{need.key} back to its default, {_override_text(default)}"
            )


def unread_warnings(config: Config) -> Iterator[str]:
    """Yield a line for each unread key of `config` that is not refused."""
    for need, value, _ in _unmet(config):
        if need.warns:
            yield f"{need.key}={_override_text(value)} has no effect without {need.setting}"


def _unmet(config: Config) -> Iterator[tuple[KeyNeed, Any, Any]]:
    """Yield each need that `config` does not meet, with the value of its key and the default."""
    defaults = Config()
    for need in NEEDS:
        value, default = (operator.attrgetter(need.key)(source) for source in (config, defaults))
        if value != default and not need.is_met(config):
            yield need, value, default


def _override_text(value: Any) -> str:
    """A value as a user writes it in `KEY=VALUE`."""
    if isinstance(value, list):
        return f"[{','.join(map(_override_text, value))}]"
    if isinstance(value, SourceConfig):
        return f"{{path: {value.path}}}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value.value if isinstance(value, Enum) else value)
