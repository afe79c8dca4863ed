"""The search space of `fxtune sweep`: its keys, and the values that each key may take.

    sweep.optimizer.lr='loguniform(1e-4,2e-3)'    drawn evenly in the logarithm
    sweep.train.max_grad_norm='uniform(0.3,2)'    drawn evenly
    sweep.techniques.lora.r='choice(8,16,32)'     one of these values; `8,16,32` is the same

A key may be shortened to a unique end of its name: `sweep.lr`, `sweep.lora.r`. A key of whole numbers draws whole
numbers. Losses are compared on the same held-out data after the same share of the run, so keys that change the data,
the model, the length of the run or the comparison are refused.
"""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from optuna import Trial

from fxtune.config.introspection import Slot, all_keys
from fxtune.config.overrides import COMMAND_LINE, RecipeStore, unquoted
from fxtune.config.root import Config
from fxtune.distributed.parallel import AUTO, DEGREES
from fxtune.errors import ConfigError, did_you_mean

PREFIX = "sweep."
SECTIONS = ("optimizer", "schedule", "techniques", "train")
"""Sections of the config whose keys may be swept."""
REFUSED = {
    "data": "it changes the data, so the losses could not be compared",
    "model": "losses of different models cannot be compared. Sweep each model by itself",
    "objective": "it changes the loss, so the losses could not be compared. Sweep each value by itself",
    "run": "it does not change what is learned, or (run.seed) the order of the data. Give it one value",
    "train.max_steps": "configurations are compared after the same share of a run of one length. Give it one value",
    "train.epochs": "configurations are compared after the same share of a run of one length. Give it one value",
    "train.eval_every": "the sweep decides when its runs evaluate",
    "train.eval_share": "the sweep decides when its runs evaluate",
    "train.pause_after": "the sweep decides when its runs end",
    "train.max_minutes": "a deadline depends on the clock, and configurations are compared after the same steps",
    "train.stop": "the sweep stops the losers itself. Add it to the recipe of the winner",
    "train.log_every": "it does not change what is learned",
}
"""The reason why a key, or a section of keys, cannot be swept."""
SMALL = 4
"""A space is small if it has at most SMALL times as many configurations as the sweep trains."""
INTERVALS = ("loguniform", "uniform")
_CALL = re.compile(r"\s*(\w+)\s*\((.*)\)\s*", re.DOTALL)


@dataclass(frozen=True)
class Dimension:
    """One swept key. `choices`: its values, each with its spelling on the command line; empty for an interval."""

    key: str
    text: str
    """The values as they were typed: `loguniform(1e-4,2e-3)`."""
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    whole: bool = False
    choices: tuple[tuple[Any, str], ...] = ()

    @property
    def size(self) -> float:
        if self.choices:
            return len(self.choices)
        return self.high - self.low + 1 if self.whole else math.inf

    @property
    def values(self) -> list[Any]:
        """The values of a choice, or of an interval of whole numbers."""
        return [value for value, _ in self.choices] or [*range(int(self.low), int(self.high) + 1)]

    def suggest(self, trial: Trial) -> Any:
        """The value that Optuna draws for `trial`."""
        if self.choices:
            return trial.suggest_categorical(self.key, self.values)
        if self.whole:
            return trial.suggest_int(self.key, int(self.low), int(self.high), log=self.log)
        return trial.suggest_float(self.key, self.low, self.high, log=self.log)

    def override(self, value: Any) -> str:
        """The word of a command line that sets `value`."""
        return f"{self.key}={dict(self.choices)[value] if self.choices else repr(value)}"


def combinations(space: Sequence[Dimension]) -> float:
    return math.prod(dimension.size for dimension in space)


def listed(space: Sequence[Dimension], count: int, seed: int) -> list[dict[str, Any]]:
    """`count` different configurations of a small space, in an order that `seed` decides; empty for a larger space.

    In a small space a sampler would draw the same configuration more than once.
    """
    if combinations(space) > SMALL * count:
        return []
    every = list(itertools.product(*(dimension.values for dimension in space)))
    chosen = random.Random(seed).sample(every, len(every))[:count]
    return [dict(zip((dimension.key for dimension in space), values, strict=True)) for values in chosen]


def parse(words: Sequence[str]) -> list[Dimension]:
    """The dimensions of `sweep.KEY=VALUES` words. Raises one ConfigError with every mistake."""
    dimensions: list[Dimension] = []
    problems = []
    for word in words:
        try:
            found = _dimension(word)
            if any(found.key == other.key for other in dimensions):
                raise ConfigError(f"`{PREFIX}{found.key}` is given twice")
            dimensions.append(found)
        except ConfigError as error:
            problems.append(f"{COMMAND_LINE}: {str(error).removeprefix(f'{COMMAND_LINE}: ')}")
    if problems:
        raise ConfigError("\n".join(problems))
    return dimensions


def _dimension(word: str) -> Dimension:
    name, equals, text = word.removeprefix(PREFIX).partition("=")
    if not equals or not text.strip():
        raise ConfigError(f"`{word}` names no values: {PREFIX}{name}='loguniform(1e-4,2e-3)' or 'choice(8,16,32)'")
    key = full_key(name)
    call = _CALL.fullmatch(text)
    if call and call[1] in INTERVALS:
        return _interval(key, text, call[1], call[2])
    if call and call[1] != "choice":
        known = (*INTERVALS, "choice")
        raise ConfigError(f"`{word}`: there is no `{call[1]}(...)`{did_you_mean(call[1], known)}")
    return _choice(key, text, call[2] if call else text)


def full_key(name: str) -> str:
    """The key that is `name` or ends in `name`. Raises ConfigError unless exactly one key fits and it can be swept."""
    keys = [*all_keys(Config)]
    if name not in keys:
        every = [key for key in keys if key.endswith(f".{name}") and ".0." not in key and not _slot(key).fields]
        ending = [key for key in every if key.split(".")[0] in SECTIONS] or every
        if len(ending) > 1:
            raise ConfigError(f"`{PREFIX}{name}` may mean {', '.join(ending)}: write the whole key")
        if not ending:
            known = {part for key in keys for part in (key, key.rpartition(".")[2])}
            raise ConfigError(f"`{PREFIX}{name}`: there is no key `{name}`{did_you_mean(name, known)}")
        name = ending[0]
    for refused, why in REFUSED.items():
        if f"{name}.".startswith(f"{refused}."):
            raise ConfigError(f"`{PREFIX}{name}` cannot be swept: {why}")
    if name.split(".")[0] not in SECTIONS:
        raise ConfigError(f"`{PREFIX}{name}` cannot be swept: it does not change what is learned")
    if _slot(name).fields:
        below = list(_slot(name).fields)
        raise ConfigError(f"`{PREFIX}{name}` is a group of keys ({', '.join(below)}): name one of them")
    return name


def _slot(key: str) -> Slot:
    slot: Slot | None = Slot(Config)
    for part in key.split("."):
        slot = slot.below(part) if slot is not None else None
    assert slot is not None
    return slot


def _interval(key: str, text: str, kind: str, inside: str) -> Dimension:
    slot, shown = _slot(key), f"`{PREFIX}{key}={text}`"
    if slot.kind not in (int, float):
        raise ConfigError(f"{shown}: {key} is no number. Name its values: choice(A,B)")
    try:
        low, high = (float(part) for part in inside.split(","))
    except ValueError:
        raise ConfigError(f"{shown}: {kind} takes two numbers, the lowest and the highest") from None
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ConfigError(f"{shown} is an empty range: the first number must be below the second")
    log = kind == "loguniform"
    if log and low <= 0:
        raise ConfigError(f"{shown}: the logarithm of {low:g} does not exist. Begin above 0, or use uniform({inside})")
    whole = slot.kind is int
    if whole and not (low.is_integer() and high.is_integer()):
        raise ConfigError(f"{shown}: {key} is a whole number, so both ends must be")
    for end in (low, high):
        _check(key, str(int(end)) if whole else repr(end))
    return Dimension(key, text, low, high, log, whole)


def _choice(key: str, text: str, inside: str) -> Dimension:
    try:
        parsed = OverridesParser.create().parse_override(f"{key}=choice({inside})")
    except HydraException as error:
        reason = str(error).strip().split("\n", 1)[0]
        raise ConfigError(f"`{PREFIX}{key}={text}` cannot be read ({reason}): choice(A,B,C)") from error
    spelled: dict[Any, str] = {}
    for value, spelling in zip(parsed.value().list, parsed.sweep_string_iterator(), strict=True):  # type: ignore[union-attr]
        _check(key, spelling)
        value = unquoted(value)
        # Optuna stores numbers and text. A list is stored as it is spelled.
        spelled.setdefault(
            value if value is None or isinstance(value, (bool, int, float, str)) else spelling, spelling
        )
    if len(spelled) < 2:
        raise ConfigError(
            f"`{PREFIX}{key}={text}` has one value only. Give {key}=VALUE, or more values to choose from"
        )
    return Dimension(key, text, choices=tuple(spelled.items()))


def _check(key: str, value: str) -> None:
    """Raise ConfigError if `key` cannot have `value`, as it is spelled on a command line."""
    RecipeStore(Config).override(f"{key}={value}")


def refuse(config: Config, max_kl: float = math.inf) -> None:
    """Raise ConfigError with each reason why this recipe cannot be swept. `max_kl`: see Sweep."""
    refusals = []
    if max_kl < math.inf and not (config.data.general and config.judges_text):
        refusals.append("--max-kl: no KL is measured, because data.general is empty or the model writes no text")
    if not config.data.holds_out:
        refusals.append(
            "nothing is held out, and configurations are compared by the held-out loss: set data.eval_fraction=0.05 "
            "or data.eval_sources"
        )
    if not config.objective.judges_held_out:
        refusals.append("objective.rewards: there is none, so no configuration is better than another")
    for key in ("train.stop.patience", "train.max_minutes", "train.eval_share", "train.pause_after"):
        if attrgetter(key)(config):
            refusals.append(f"{key}: {REFUSED[key.removesuffix('.patience')]}. Leave it out")
    degrees = ((f"parallel.{name}", getattr(config.parallel, name)) for name in DEGREES)
    several = [
        f"{key}={value}" for key, value in [("run.gpus", config.run.gpus), *degrees] if value not in (AUTO, "1")
    ]
    for asked in (*several, *config.parallel.summed_otherwise):
        refusals.append(f"{asked}: each run of a sweep has one card. Leave it out, and add it to the recipe that wins")
    if refusals:
        raise ConfigError("This recipe cannot be swept as it is:\n" + "\n".join(f"  {line}" for line in refusals))
