"""Keys, types and ranges are read from the dataclasses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

import pytest

from fxtune.config.introspection import Slot, all_keys, is_free
from fxtune.config.root import Config


@dataclass
class Inner:
    rate: float = field(default=0.5, metadata={"min": 0, "below": 1})
    steps: Optional[int] = field(default=None, metadata={"min": 1})


@dataclass
class Outer:
    inner: Inner = field(default_factory=Inner)
    entries: list[Inner] = field(default_factory=list)
    betas: list[float] = field(default_factory=list, metadata={"above": 0, "max": 1})
    free: dict[str, Any] = field(default_factory=dict)


def test_every_key_is_listed_as_it_is_typed():
    entry = ["entries.0.rate", "entries.0.steps"]
    assert list(all_keys(Outer)) == ["inner", "inner.rate", "inner.steps", "entries", *entry, "betas", "free"]


@pytest.mark.parametrize(
    ("keys", "number", "message"),
    [
        ("inner.rate", 0, None),
        ("inner.rate", 1.0, "at least 0 and below 1"),
        ("inner.steps", 0, "at least 1"),
        ("entries.3.rate", -1, "at least 0 and below 1"),
        ("betas.0", 1, None),
        ("betas.0", 0, "above 0 and at most 1"),
    ],
)
def test_range_is_metadata_of_the_field_and_holds_for_list_entries(keys, number, message):
    slot = Slot(Outer)
    for key in keys.split("."):
        slot = slot.below(key)
    assert slot.range_broken(number) == message


def test_optional_and_free_fields():
    steps = Slot(Outer).below("inner").below("steps")
    assert (steps.kind, steps.nullable) == (int, True)
    assert is_free(Outer, ("free", "any", "key"))
    assert not is_free(Outer, ("inner", "rate"))
    assert Slot(Outer).below("entries").below("first") is None


def test_metadata_of_the_config_are_known_limits():
    def slots(slot):
        yield slot
        for inner in (*slot.fields.values(), *([slot.below("0")] if slot.container is list else [])):
            yield from slots(inner)

    limits = {name for slot in slots(Slot(Config)) for name in slot.limits}
    assert limits == {"min", "max", "above", "below"}
