"""Reads the keys of a config from the dataclasses, with the type and the range of each value.

A range is the metadata of a number's field: `lr: float = field(default=2e-4, metadata={"above": 0})`. `min` and `max`
are allowed values, `above` and `below` are not. The range of a list's field holds for each entry.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

Keys = tuple[str, ...]
"""A key, split at its dots: ("data", "sources", "0", "path")."""

_LIMITS: dict[str, tuple[Callable[[float, float], bool], str]] = {
    "min": (lambda number, limit: number >= limit, "at least"),
    "above": (lambda number, limit: number > limit, "above"),
    "max": (lambda number, limit: number <= limit, "at most"),
    "below": (lambda number, limit: number < limit, "below"),
}


@dataclass(frozen=True)
class Slot:
    """What one key may hold."""

    kind: Any
    """Its type; X where the field's type is Optional[X]."""
    nullable: bool = False
    limits: Mapping[str, float] = field(default_factory=dict)

    @property
    def fields(self) -> dict[str, Slot]:
        """The keys of a section; empty for anything else."""
        is_section = isinstance(self.kind, type) and dataclasses.is_dataclass(self.kind)
        return _fields(self.kind) if is_section else {}

    @property
    def choices(self) -> list[str]:
        """The members of an enum; empty for anything else."""
        is_enum = isinstance(self.kind, type) and issubclass(self.kind, Enum)
        return [member.name for member in self.kind] if is_enum else []

    @property
    def container(self) -> Any:
        """`list` or `dict`, if it is one of these."""
        return typing.get_origin(self.kind)

    @property
    def takes_any_key(self) -> bool:
        return self.kind is Any or self.container is dict

    def below(self, key: str) -> Slot | None:
        """The slot under `key`; None if there is none."""
        if self.kind is Any:
            return self
        if self.container is dict or (self.container is list and key.isdigit()):
            return _slot(typing.get_args(self.kind)[-1], self.limits)
        return self.fields.get(key)

    def range_broken(self, number: float) -> str | None:
        """The range that `number` is outside of, in words; None if it is inside."""
        if all(_LIMITS[name][0](number, limit) for name, limit in self.limits.items()):
            return None
        return " and ".join(f"{_LIMITS[name][1]} {limit}" for name, limit in self.limits.items())


def _slot(hint: Any, limits: Mapping[str, float]) -> Slot:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        kinds = [part for part in typing.get_args(hint) if part is not type(None)]
        return Slot(kinds[0], len(kinds) < len(typing.get_args(hint)), limits)
    return Slot(hint, hint is Any, limits)


@functools.cache
def _fields(schema: type) -> dict[str, Slot]:
    hints = typing.get_type_hints(schema)
    return {item.name: _slot(hints[item.name], item.metadata) for item in dataclasses.fields(schema)}


def all_keys(schema: type, prefix: str = "") -> Iterator[str]:
    """Yield every key as it is typed: `optimizer`, `optimizer.lr`, `data.sources.0.path`, ..."""
    for name, slot in Slot(schema).fields.items():
        yield prefix + name
        entry = slot.below("0") if slot.container is list else slot
        if entry is not None and entry.fields:
            yield from all_keys(entry.kind, f"{prefix}{name}.{'0.' if entry is not slot else ''}")


def is_free(schema: type, keys: Keys) -> bool:
    """Whether `keys`, which exist, lead to or below a field that takes keys of any name (`model.architecture`)."""
    slot: Slot | None = Slot(schema)
    for key in keys:
        if slot is None or slot.takes_any_key:
            break
        slot = slot.below(key)
    return slot is not None and slot.takes_any_key
