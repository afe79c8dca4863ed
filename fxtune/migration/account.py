"""Accounts for each key of another tool's config: no key is left out silently.

keys.yaml says what becomes of each key that acts alone. Keys that act together are translated by a tool's function
`decide` and its `rules`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from omegaconf import BooleanNode

from fxtune.config.introspection import Slot
from fxtune.config.root import Config
from fxtune.errors import ConfigError, did_you_mean

UNSET: tuple[Any, ...] = (None, "", [], {})
KINDS = ("to", "without", "differs", "refused")
ROWS = (
    *("dataset", "pretraining_dataset", "interleave_probs", "max_samples"),
    *("dataset_text_field", "dataset_config", "dataset_train_split", "dataset_test_split"),
)
EVAL_ROWS = ("eval_dataset", "test_datasets", "val_dataset", "validation_file")
"""The keys that name rows to train on or a part of them, and rows to evaluate on."""
OFF = (False, 0, "no", "none", "None")


class Fate(str, Enum):
    translated = "translated"
    differs = "differs"
    no_effect = "no effect here"
    refused = "refused"


@dataclass(frozen=True)
class Entry:
    key: str
    value: Any
    fate: Fate
    text: str
    """The keys of the recipe with their values, or the reason."""


@dataclass(frozen=True)
class Tool:
    name: str
    decide: Callable[[Account], None]
    rules: Mapping[str, Rule] = field(default_factory=dict)

    @cached_property
    def table(self) -> dict[str, Any]:
        """The tool's section of keys.yaml, with its texts read as mappings. It also has `lines`: {key: (`to`,
        `without`, `differs` or `refused`; the reason; the text after `=` in the file, or else the key)}."""
        found = yaml.safe_load(Path(__file__).with_name("keys.yaml").read_text(encoding="utf-8"))
        own = found[self.name]
        shared = found["shared"] if own.get("shared", True) else {}
        lines = {
            key: (kind, found["reasons"].get(head, head), word)
            for section in (shared, own)
            for kind in KINDS
            for head, keys in ({"": section.get("to", "")} if kind == "to" else section.get(kind, {})).items()
            for key, word in pairs(keys).items()
        }
        return own | {
            "lines": lines,
            "reasons": found["reasons"],
            "names": {name: key for key, name in pairs(own.get("names", "")).items()},
            "values": {key: pairs(words) for key, words in found["values"].items()},
            "defaults": shared.get("defaults", {}) | own.get("defaults", {}),
        }


@dataclass
class Account:
    """A config, the recipe that is made from it, and what became of each key. Methods take the names of keys.yaml."""

    tool: Tool
    config: Mapping[str, Any]
    gpus: int = 1
    """The number of cards on which the other tool ran the config. It is a factor of the global batch."""
    file: Path = Path()
    method: str = "sft"
    """The method of training. TRL has it in the command, not in the file."""
    data: str = ""
    """A file of rows that replaces the config's rows; empty: the config's rows stay."""
    recipe: dict[str, Any] = field(default_factory=dict)
    """{key of fxtune with dots: value}."""
    entries: dict[str, Entry] = field(default_factory=dict)
    """{the tool's name of a key: the entry}, also for keys that the config does not set."""
    differences: list[str] = field(default_factory=list)
    """A sentence for each difference between training by the recipe and by the other tool."""

    @property
    def objective(self) -> Slot:
        """The section `objective` of the recipe so far."""
        return Slot(Config).fields["objective"].chosen({"name": self.recipe.get("objective", "causal_lm")})

    def own(self, name: str) -> str:
        """The tool's own name of a key."""
        return self.tool.table["names"].get(name, name)

    def has(self, name: str) -> bool:
        return self.config.get(self.own(name)) not in UNSET

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a key. If the config does not set the key: the tool's default, or else `default`."""
        return self.config[self.own(name)] if self.has(name) else self.tool.table["defaults"].get(name, default)

    def set(self, target: str, value: Any, *names: str) -> None:
        """Give the recipe's key `target` a value that follows from the keys `names`."""
        try:
            found = convert(target, value)
        except (TypeError, ValueError):
            if not names:
                raise
            return self.refuse(f"{_short(value)} is no value of {target}: see `fxtune help {target}`", *names)
        if found is None is not value:
            why = self.tool.table["reasons"].get(target, f"no count: {target} has its default")
            return (self.differ if 0 < float(value) < 1 else self.note)(why, *names)
        self.recipe[target] = found
        for name in names:
            before = self.entries.get(self.own(name))
            also = f"{before.text}, " if before and before.fate is Fate.translated else ""
            self._enter(Fate.translated, f"{also}{target}={_short(found)}", name)

    def note(self, why: str, *names: str) -> None:
        """Record that the keys `names` have no effect here, and why. Their differences are taken back."""
        own = {*map(self.own, names)}
        self.differences = [it for it in self.differences if it.replace("=", ":").split(":")[0] not in own]
        self._enter(Fate.no_effect, why, *names)

    def refuse(self, why: str, *names: str) -> None:
        """Record that the keys `names` are refused. `why`: what fxtune cannot do, and what to change."""
        self._enter(Fate.refused, why, *names)

    def differ(self, why: str, *names: str) -> None:
        """Record how the tool trains otherwise. `names`: the keys that make it do so."""
        self._enter(Fate.differs, why, *names)
        keys = ", ".join(f"{self.own(name)}={_short(self.get(name))}" for name in names)
        self.differences = [*dict.fromkeys([*self.differences, f"{keys}: {why}" if names else why])]

    def shown(self) -> list[Entry]:
        """The entries of the config's keys and of keys inside them, and of refused keys that the config lacks."""
        refused = (key for key, entry in self.entries.items() if entry.fate is Fate.refused)
        tops = dict.fromkeys([*self.config, *refused])
        return [entry for top in tops for key, entry in sorted(self.entries.items()) if key.split(".")[0] == top]

    def word(self, name: str, default: Any = None) -> Any:
        """The value of a key, in the recipe's words."""
        return self.tool.table["values"].get(name, {}).get(str(self.get(name, default)), self.get(name, default))

    def follow(self, name: str) -> None:
        """Translate a key by the tool's rule for it, or else by keys.yaml."""
        if name in self.tool.rules:
            return self.tool.rules[name](self, name)
        (kind, head, word), value = self.tool.table["lines"][name], self.get(name)
        if kind == "to":
            target, _, choices = word.partition(":")
            if target in self.recipe and not self.has(name):
                return None  # another key has decided, and this value is only a default
            is_read = target.removeprefix("objective.") in (target, *self.objective.fields)
            if not is_read and not ("objective" in self.recipe and self.has(name)):
                return self.note("nothing reads it without an objective that does", name)
            self.set(target, choices.split("|")[bool(value)] if choices else self.word(name), name)
        elif kind == "without":
            self.note(head, name)
        elif value in OFF and (kind == "refused" or word == name):
            self.note("off", name)
        elif word != name and within(value, word):
            if "lora" in word.split("|"):
                return self.set("techniques", self.recipe["techniques"], name)  # decide() has translated the value
            self.note(head if kind == "differs" else "fxtune does so, too", name)
        elif kind == "differs":
            self.differ(head, name)
        else:
            self.refuse(head, name)

    def _enter(self, fate: Fate, text: str, *names: str) -> None:
        for name, key in ((name, self.own(name)) for name in names):
            shown = text if fate is not Fate.no_effect or self.has(name) else "not set"
            self.entries[key] = Entry(key, self.config.get(key), fate, shown)


Rule = Callable[[Account, str], None]
"""Translates one key, given by its name in keys.yaml."""


def read(tool: Tool, config: Mapping[str, Any], **options: Any) -> Account:
    """Account for each key of `config`. `options`: other fields of Account. Raises ConfigError for a value that the
    tool would not take."""
    account, table = Account(tool, config, **options), tool.table
    known = {account.own(name): name for name in (*table["lines"], *tool.rules)}
    try:
        tool.decide(account)
        for key in dict.fromkeys([*config, *map(account.own, table["defaults"])]):
            if key in account.entries:
                continue
            if config.get(key) in UNSET and known.get(key) not in table["defaults"]:
                account.entries[key] = Entry(key, None, Fate.no_effect, "not set")
            elif key in known:
                account.follow(known[key])
            else:
                why = f"`fxtune import` does not know this key{did_you_mean(key, known)}"
                account.entries[key] = Entry(key, config[key], Fate.refused, why)
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"{account.file}: a value is none that {tool.name} takes: {error}") from error
    if account.data:  # its rows are trained on, and a share of them is held out if the config evaluates
        evaluates = "data.eval_sources" in account.recipe or any(map(account.has, EVAL_ROWS))
        account.note("--data replaces it", *ROWS, *EVAL_ROWS)
        account.set("data.sources", [{"path": account.data}], "dataset")
        if evaluates:
            account.recipe.pop("data.eval_sources", None)
            account.set("data.eval_fraction", 0.05)
            account.differ("--data also replaces the rows to evaluate on: 5 % of the rows of --data are held out")
    if not account.recipe.keys() & {"data.eval_fraction", "data.eval_sources"}:
        account.recipe.pop("train.eval_every", None)
        account.note("nothing is held out", "eval_steps", "evals_per_epoch", "eval_strategy")
    elif not account.get("load_best_model_at_end"):
        account.differ("the weights of the lowest held-out loss are exported (run.export=last: of the end)")
    return account


def convert(target: str, value: Any) -> Any:
    """`value` in the type of the recipe's key; YAML reads `2e-5` as text. None if the key is a count and `value` is no
    count (-1, or a share of the run). Raises ValueError if the key cannot have this value."""
    slot = Slot(Config)
    for key in target.split("."):
        slot = slot.below(key) or Slot(Any)
    if value is None or value in slot.words:
        return value
    choices = slot.choices or [*slot.variants]
    if (choices and value not in choices) or (slot.container is list and isinstance(value, dict)):
        raise ValueError(f"{target}={value}")
    if slot.container is list:
        return listed(value)
    if slot.kind is bool:
        return BooleanNode().validate_and_convert(value)
    if slot.kind not in (int, float):
        return str(value) if slot.kind is str else value
    number = float(str(value).removesuffix("GiB"))
    found = int(number) if number.is_integer() else number
    return found if slot.kind is float or (isinstance(found, int) and found >= 0) else None


def within(value: Any, words: str) -> bool:
    """Whether a value, or each entry of a list, or each key of a section, is A or B, or ends in `.A` or `.B`. `words`:
    `A|B`."""
    parts = value if isinstance(value, (list, dict)) else [value]
    return {str(part).rpartition(".")[2] for part in parts} <= {*words.split("|")}


def listed(value: Any) -> list[Any]:
    """`value` as a list. A config may have a single value, or a text with commas, in place of a list."""
    given = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else [value]
    return [part.strip() if isinstance(part, str) else part for part in given]


def pairs(text: str) -> dict[str, str]:
    """`a=b c` as {a: b, c: c}."""
    return {word.partition("=")[0]: word.partition("=")[2] or word for word in text.split()}


def _short(value: Any) -> str:
    return (str(value).lower() if isinstance(value, bool) else str(value))[:80]
