"""What becomes of each key of another tool's config: no key is left out in silence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from fxtune.errors import did_you_mean

UNSET: tuple[Any, ...] = (None, "", [], {})


class Fate(str, Enum):
    translated = "translated"
    """The recipe has it."""
    no_effect = "no effect here"
    """fxtune does or decides this anyway, or it changes nothing that is trained."""
    refused = "refused"
    """fxtune cannot do it, so the recipe would train something else."""


@dataclass(frozen=True)
class Entry:
    key: str
    value: Any
    fate: Fate
    text: str
    """The keys of the recipe, or the reason."""


@dataclass
class Account:
    """A config, the recipe that grows from it, and what became of each key."""

    config: Mapping[str, Any]
    gpus: int = 1
    """On how many cards the other tool ran the config: its global batch follows from them."""
    recipe: dict[str, Any] = field(default_factory=dict)
    """{key of fxtune with dots: value}."""
    entries: dict[str, Entry] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)
    """What the recipe trains otherwise than the other tool, one sentence each."""

    def __post_init__(self) -> None:
        for key, value in self.config.items():
            if value in UNSET:
                self._enter(key, Fate.no_effect, "not set")

    def get(self, key: str, default: Any = None) -> Any:
        """The value of `key`; `default` where it is not set."""
        value = self.config.get(key)
        return default if value in UNSET else value

    def has(self, key: str) -> bool:
        return self.get(key) is not None

    def set(self, target: str, value: Any, *keys: str) -> None:
        """Give the recipe's key `target` a value that follows from `keys`."""
        self.recipe[target] = value
        for key in keys:
            before = self.entries.get(key)
            also = f"{before.text}, " if before and before.fate is Fate.translated else ""
            self._enter(key, Fate.translated, f"{also}{target}={_short(value)}")

    def note(self, why: str, *keys: str) -> None:
        """`keys` have no effect here."""
        for key in keys:
            self._enter(key, Fate.no_effect, why)

    def refuse(self, why: str, *keys: str) -> None:
        """`why`: what fxtune cannot do, and what to change."""
        for key in keys:
            self._enter(key, Fate.refused, why)

    def differ(self, sentence: str) -> None:
        if sentence not in self.differences:
            self.differences.append(sentence)

    def follow(self, rules: Mapping[str, Rule]) -> None:
        """Apply `rules` to the keys that have no entry yet. A key without a rule is refused."""
        for key in self.config:
            if key in self.entries:
                continue
            rule = rules.get(key)
            if rule is None:
                self.refuse(f"`fxtune import` does not know this key{did_you_mean(key, rules)}", key)
            else:
                rule(self, key)

    def of(self, fate: Fate) -> list[Entry]:
        return [entry for entry in self.entries.values() if entry.fate is fate]

    def _enter(self, key: str, fate: Fate, text: str) -> None:
        if key in self.config:
            self.entries[key] = Entry(key, self.config[key], fate, text)


Rule = Callable[[Account, str], None]
"""What becomes of a key that stands alone."""


def to(target: str, convert: Callable[[Any], Any] = lambda value: value) -> Rule:
    """The key is `target` in the recipe."""

    def rule(account: Account, key: str) -> None:
        try:
            account.set(target, convert(account.get(key)), key)
        except (TypeError, ValueError):
            account.refuse(f"{_short(account.get(key))} is no value of {target}", key)

    return rule


def without(why: str) -> Rule:
    """The key has no effect here."""
    return lambda account, key: account.note(why, key)


def refused(why: str) -> Rule:
    """fxtune cannot do what the key asks for. A key that is false or 0 asks for nothing."""

    def rule(account: Account, key: str) -> None:
        if account.get(key) in (False, 0, "no", "none", "None"):
            account.note("off", key)
        else:
            account.refuse(why, key)

    return rule


def each(keys: Iterable[str] | str, rule: Rule) -> dict[str, Rule]:
    """The same rule for several keys, given as a list or as words."""
    return dict.fromkeys(keys.split() if isinstance(keys, str) else keys, rule)


def number(value: Any) -> float:
    """A number that YAML may have read as text (`2e-5`). Raises ValueError."""
    found = float(value)
    return int(found) if found.is_integer() and abs(found) >= 1 else found


def _short(value: Any) -> str:
    text = str(value.value if isinstance(value, Enum) else value)
    text = text.lower() if isinstance(value, bool) else text
    return text if len(text) <= 60 else f"{text[:57]}..."
