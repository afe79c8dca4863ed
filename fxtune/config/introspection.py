"""What keys a config has, and of which types their values are: read from the dataclasses that it becomes."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Iterator
from enum import Enum
from typing import Any

from fxtune.config.yaml_reader import Keys


def all_keys(schema: Any, prefix: str = "") -> Iterator[str]:
    """Every key there is, as it is typed: `optimizer`, `optimizer.lr`, `data.sources.0.path`, ..."""
    for name, hint in hints(schema).items():
        yield prefix + name
        inner, _ = stripped(hint)
        if dataclasses.is_dataclass(inner):
            yield from all_keys(inner, f"{prefix}{name}.")
        elif typing.get_origin(inner) is list and dataclasses.is_dataclass(typing.get_args(inner)[0]):
            yield from all_keys(typing.get_args(inner)[0], f"{prefix}{name}.0.")


def is_free(schema: type, keys: Keys) -> bool:
    """Whether `keys` lead to, or below, a field that takes keys of any name (`model.architecture`)."""
    hint: Any = schema
    for key in keys:
        if _takes_any_key(hint):
            return True
        hint = under(stripped(hint)[0], key)
    return _takes_any_key(hint)


def _takes_any_key(hint: Any) -> bool:
    inner, _ = stripped(hint)
    return inner is Any or typing.get_origin(inner) is dict


def hints(schema: Any) -> dict[str, Any]:
    """Each field of a dataclass with its type."""
    return _resolved(schema)


@functools.cache
def _resolved(schema: type) -> dict[str, Any]:
    found = typing.get_type_hints(schema)
    return {item.name: found[item.name] for item in dataclasses.fields(schema)}


def stripped(hint: Any) -> tuple[Any, bool]:
    """Optional[X] as (X, True), anything else as (itself, False)."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        inner = [part for part in typing.get_args(hint) if part is not type(None)]
        return inner[0], len(inner) < len(typing.get_args(hint))
    return hint, False


def under(inner: Any, key: str) -> Any:
    """The type of what stands under `key`, None where nothing can."""
    if inner is Any:
        return Any
    if dataclasses.is_dataclass(inner):
        return hints(inner).get(key)
    if typing.get_origin(inner) is list:
        return typing.get_args(inner)[0] if key.isdigit() else None
    return typing.get_args(inner)[1] if typing.get_origin(inner) is dict else None


def choices(hint: Any) -> list[str]:
    """The words of a closed choice; none where `hint` is something else."""
    inner, _ = stripped(hint)
    return [member.name for member in inner] if isinstance(inner, type) and issubclass(inner, Enum) else []
