"""Checks of JSON values in rows: type, depth, nulls, repeated keys. RowError is the reason of a bad row."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Collection, Mapping
from typing import Any

from fxtune.errors import DataError

MAX_DEPTH = 100
"""A row with lists and objects nested deeper than this is a bad row."""
TOO_DEEP = f"lists and objects are nested more than {MAX_DEPTH} deep"
NOT_UTF8 = (
    "not UTF-8. Convert the file (`iconv -f LATIN1 -t UTF-8`, or from another encoding), or save it from Excel as "
    "`CSV UTF-8`"
)
SURROGATE = re.compile("[\ud800-\udfff]")

_TYPE_NAMES = {type(None): "null", bool: "a boolean", str: "a string", dict: "an object"}
_TYPE_NAMES |= dict.fromkeys((int, float), "a number") | dict.fromkeys((list, tuple), "a list")


class RowError(DataError):
    """One row cannot be used. The message is the reason alone; the reader of the source adds the file and the line."""


def unicode_fault(text: str) -> str:
    """The reason why a text is not Unicode; empty if it is. Readers decode with surrogateescape, which turns a byte
    that is not UTF-8 into a character from U+DC80 to U+DCFF."""
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        is_byte = "\udc80" <= text[problem.start] <= "\udcff"
        return NOT_UTF8 if is_byte else "holds half a surrogate pair (a broken emoji)"
    return ""


def short(value: Any) -> str:
    """A value of a row, shortened for a message."""
    return reprlib.repr(value)


def spelled(word: str) -> str:
    """A word, shortened for a message. If it has a letter outside ASCII, the code of the first one is added,
    because it may look like an ASCII letter."""
    letter = next((letter for letter in word if not letter.isascii()), None)
    return short(word) + (f" (with U+{ord(letter):04X})" if letter else "")


def require_text(value: Any, where: str) -> str:
    """Returns `value` if it is a string that UTF-8 can encode. Otherwise raises RowError, which names `where`."""
    if not isinstance(value, str):
        raise RowError(f"{where} is {type_name(value)}" + ("" if value is None else ", not a string"))
    if not value.isascii() and (lone := SURROGATE.search(value)):
        code = ord(lone.group())
        raise RowError(
            f"{where} holds the lone surrogate \\u{code:04x} at character {lone.start()}: not valid Unicode"
        )
    return value


def require_words(value: Any, where: str) -> str:
    """require_text(), which also raises RowError for a text without a visible character."""
    if not require_text(value, where).strip():
        raise RowError(f"{where} is empty")
    return str(value)


def parse_json(text: str, where: str) -> Any:
    try:
        value = json.loads(text, object_pairs_hook=unique_keys)
    except RepeatedKeyError as error:
        raise RowError(f"{where}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise RowError(f"{where} is not valid JSON: {error}") from None
    if is_too_deep(text, value):
        raise RowError(f"{where}: {TOO_DEEP}")
    return value


class RepeatedKeyError(ValueError):
    """An object of a JSON text has the same key twice."""


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The `object_pairs_hook` with which every reader of rows parses JSON. Raises RepeatedKeyError if an object has a
    key twice. Without this hook, Python would keep only the last value."""
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for index, key in enumerate(keys) if key in keys[:index])
        raise RepeatedKeyError(f"an object has the key {reprlib.repr(repeated)} twice; keep one of its values")
    return value


def without_nulls(value: Any, keep: Collection[str] = ()) -> Any:
    """A copy of `value` without the null values of objects, except under keys of `keep`. Nulls in lists stay."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item, keep) for key, item in value.items() if item is not None or key in keep}
    if isinstance(value, (list, tuple)) and value and not isinstance(value[0], (int, str)):  # ids and texts stay as is
        return [without_nulls(item, keep) for item in value]
    return value


def is_too_deep(text: str, value: Any) -> bool:
    """Whether `value`, parsed from `text`, is nested deeper than MAX_DEPTH."""
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return False
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [item for item in level if isinstance(item, (list, dict))]
        if not level:
            return False
        level = [item for outer in level for item in (outer.values() if isinstance(outer, dict) else outer)]
    return True


def type_name(value: Any) -> str:
    """The JSON type of a value, for messages."""
    return _TYPE_NAMES.get(type(value), f"of type {type(value).__name__}")
