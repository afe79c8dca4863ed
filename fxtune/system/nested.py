"""Values inside of tuples, lists and dicts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def leaves(value: Any) -> Iterator[Any]:
    """Every value inside of `value` that is neither a tuple, a list nor a mapping."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if not isinstance(value, (tuple, list)):
        yield value
        return
    for inner in value:
        yield from leaves(inner)
