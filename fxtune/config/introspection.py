"""Reads the keys of a config from the dataclasses, with the type and the range of each value.

The metadata of a number's field is its range: `lr: float = field(default=2e-4, metadata={"above": 0})`. `min` and
`max` are allowed values, `above` and `below` are not. The range of a list's field applies to each entry. A field that
takes a word beside values of one type is `Any` for OmegaConf. Its metadata is {"kind": bool, "words": ("auto",)}, with
"nullable": True if it may also be null. If the keys of a section depend on its `name`, the metadata "variants" has the
section's class for each name.

Each number has a lower limit. A number without an upper limit is at most LARGEST, so that no calculation overflows.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import operator
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

Keys = tuple[str, ...]
"""A key, split at its dots: ("data", "sources", "0", "path")."""

_LIMITS: dict[str, tuple[Callable[[float, float], bool], str]] = {
    "min": (operator.ge, "at least"),
    "above": (operator.gt, "above"),
    "max": (operator.le, "at most"),
    "below": (operator.lt, "below"),
}


LARGEST: dict[Any, float] = {int: 2**31 - 1, float: 1e9}
"""The largest number that a field without an upper limit takes."""


@dataclass(frozen=True)
class Slot:
    """What one key may hold."""

    kind: Any
    """The type of the value; X if the field's type is Optional[X]."""
    nullable: bool = False
    limits: Mapping[str, float] = field(default_factory=dict)
    words: Iterable[str] = ()
    """Words that the key may also hold, such as `auto`, or names that plugins have registered."""
    variants: Mapping[str, type] = field(default_factory=dict)
    """The dataclass of a section for each value of its key `name`. All derive from `kind`."""
    takes: str = ""
    """A description of the texts that the key takes, if its section checks them. Empty if any text is allowed."""

    @property
    def fields(self) -> dict[str, Slot]:
        """The keys of a section in all its variants. Empty if the slot is no section."""
        if not (isinstance(self.kind, type) and dataclasses.is_dataclass(self.kind)):
            return {}
        found = dict(_fields(self.kind))
        for variant in self.variants.values():
            for name, slot in _fields(variant).items():
                found[name] = slot if found.get(name, slot) == slot else Slot(Any, nullable=True)
        return found

    def chosen(self, values: Mapping[str, Any]) -> Slot:
        """The section in the variant that `values` choose by their `name`. This slot, if they choose none."""
        name = values.get("name")
        return Slot(self.variants[name]) if isinstance(name, str) and name in self.variants else self

    def owner(self, key: str) -> type:
        """The dataclass that has the field `key` of a section."""
        owners: list[type] = [self.kind, *self.variants.values()]
        return next((owner for owner in owners if key in _fields(owner)), owners[0])

    def definitions(self, key: str) -> dict[type, list[str]]:
        """The dataclasses that define the field `key` of a section, each with the variants that inherit it there."""
        found: dict[type, list[str]] = {}
        for name, kind in {"": self.kind, **self.variants}.items():
            if key in _fields(kind):
                of = next(base for base in kind.__mro__ if key in vars(base).get("__annotations__", {}))
                found.setdefault(of, []).append(name)
        return found

    @property
    def switches(self) -> tuple[str, ...]:
        """The keys that a word in place of the whole section sets to true. `data.learn=since_last_question` sets
        data.learn.since_last_question."""
        return getattr(self.kind, "SWITCHES", ()) if self.fields else ()

    @property
    def choices(self) -> list[str]:
        """All allowed values, for an enum (with the names that plugins add) or a text with words. Otherwise empty."""
        if self.kind is str:
            return [*self.words]
        is_enum = isinstance(self.kind, type) and issubclass(self.kind, Enum)
        return [*(member.name for member in self.kind), *self.words] if is_enum else []

    @property
    def container(self) -> Any:
        """The generic class of the slot, such as `list` or `dict`; None for a plain class."""
        return typing.get_origin(self.kind)

    @property
    def takes_any_key(self) -> bool:
        """Whether OmegaConf's schema allows keys of any name in this slot."""
        return self.kind is Any or self.container is dict or bool(self.variants)

    def below(self, key: str) -> Slot | None:
        """The slot under `key`; None if the key does not exist."""
        if self.kind is Any:
            return self
        if self.container is dict or (self.container is list and key.isdigit()):
            return _slot(typing.get_args(self.kind)[-1], self.limits)
        return self.fields.get(key)

    @property
    def range(self) -> str:
        """The numbers that the slot may hold, in words: `at least 0 and below 1`."""
        return " and ".join(f"{_LIMITS[name][1]} {limit}" for name, limit in self.limits.items())

    def range_broken(self, number: float) -> str | None:
        """The range in words, if `number` is outside of it; None if `number` is inside."""
        largest = LARGEST.get(self.kind)
        if largest is not None and number > largest and not {"max", "below"} & self.limits.keys():
            return f"at most {largest:,.0f}"
        inside = all(_LIMITS[name][0](number, limit) for name, limit in self.limits.items())
        return None if inside else self.range


def _slot(hint: Any, metadata: Mapping[str, Any]) -> Slot:
    limits = {name: limit for name, limit in metadata.items() if name in _LIMITS}
    if "kind" in metadata:
        words, variants = metadata.get("words", ()), metadata.get("variants", {})
        return Slot(metadata["kind"], metadata.get("nullable", False), limits, words, variants)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        kinds = [part for part in typing.get_args(hint) if part is not type(None)]
        return Slot(kinds[0], len(kinds) < len(typing.get_args(hint)), limits)
    return Slot(hint, hint is Any, limits, takes=metadata.get("takes", ""))


@functools.cache
def _fields(schema: type) -> dict[str, Slot]:
    hints = typing.get_type_hints(schema)
    return {item.name: _slot(hints[item.name], item.metadata) for item in dataclasses.fields(schema)}


def all_keys(schema: type) -> Iterator[str]:
    """Yield every key as it is typed: `optimizer`, `optimizer.lr`, `data.sources.0.path`, ..."""
    yield from _keys(Slot(schema), "")


def _keys(section: Slot, prefix: str) -> Iterator[str]:
    for name, slot in section.fields.items():
        yield prefix + name
        entry = slot.below("0") if slot.container is list else slot
        if entry is not None and entry.fields:
            yield from _keys(entry, f"{prefix}{name}.{'0.' if entry is not slot else ''}")


def is_free(schema: type, keys: Keys) -> bool:
    """Whether `keys` lead to or below a field that takes keys of any name (`model.architecture`). The keys exist."""
    slot: Slot | None = Slot(schema)
    for key in keys:
        if slot is None or slot.takes_any_key:
            break
        slot = slot.below(key)
    return slot is not None and slot.takes_any_key


def with_defaults(schema: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """`values`, the plain data of a `schema`, with the defaults of keys that a later version of fxtune added."""
    filled = dict(values)
    for item in dataclasses.fields(schema):
        slot, value = _fields(schema)[item.name], values.get(item.name)
        if item.name not in values:
            factory = item.default_factory
            default = item.default if factory is dataclasses.MISSING else factory()
            if default is not dataclasses.MISSING:
                filled[item.name] = json.loads(json.dumps(default, default=dataclasses.asdict))
        elif slot.fields and isinstance(value, dict):
            filled[item.name] = with_defaults(slot.chosen(value).kind, value)
        elif slot.container is list and isinstance(value, list):
            entry = slot.below("0")
            if entry is not None and entry.fields:
                filled[item.name] = [
                    with_defaults(entry.kind, element) if isinstance(element, dict) else element for element in value
                ]
    return filled
