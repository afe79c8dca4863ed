"""Row formats, and how the format of a row is detected.

| format            | columns                                                                    |
|-------------------|----------------------------------------------------------------------------|
| messages          | `messages`: [{role, content}, ...] (OpenAI), optionally `tools`            |
| sharegpt          | `conversations`: [{from, value}, ...]                                      |
| prompt_completion | `prompt`, `completion`: two strings, or two lists of messages              |
|                   | (`question`, `answer` and `prompt`, `response`: two strings)               |
| alpaca            | `instruction`, `output`, optionally `input`                                |
| tokens            | `input_ids`, optionally `labels` (-100: not supervised) or `assistant_masks` (0 or 1) |
| text              | `text`: every token is supervised                                          |
| group             | `documents`: rows of these formats, learned together; optionally `labels`  |
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping
from enum import Enum
from typing import Any

from fxtune.errors import DataError, nearest
from fxtune.plugins import ROW_FORMATS


class RowFormat(str, Enum):
    auto = "auto"
    messages = "messages"
    sharegpt = "sharegpt"
    alpaca = "alpaca"
    prompt_completion = "prompt_completion"
    text = "text"
    tokens = "tokens"
    group = "group"


SPLIT_AT_TURNS = (RowFormat.messages, RowFormat.sharegpt, RowFormat.alpaca, RowFormat.prompt_completion)
"""Formats whose long documents are split between turns, not at any token."""

GROUP_FORMATS = (RowFormat.group,)
"""Formats whose rows hold several documents, which stay together: they are never cut."""

ROW_FORMATS.reserve(RowFormat)

COLUMNS = {
    RowFormat.messages: ("messages",),
    RowFormat.sharegpt: ("conversations",),
    RowFormat.prompt_completion: ("prompt", "completion"),
    RowFormat.alpaca: ("instruction", "output"),
    RowFormat.tokens: ("input_ids",),
    RowFormat.text: ("text",),
}
"""The columns that a format requires. `text` comes last, because many chat datasets hold
their rendered text as well."""

PAIRS = (("question", "answer"), ("prompt", "response"))
"""Names so common that rows with them are read as prompt and completion. Others need the source's `columns`."""

SYNONYMS = {
    "prompt": ("question", "query", "problem", "input", "instruction", "source", "user"),
    "completion": ("answer", "response", "output", "solution", "target", "reply", "assistant"),
    "text": ("content", "body", "document", "raw_content", "code", "article"),
}


def detect_format(rows: list[dict[str, Any]], source: str) -> RowFormat:
    """The format of most of `rows`. Raises DataError with their columns, and with those to rename if that may help."""
    found = Counter(one for one in map(row_format, rows) if one is not None)
    if found:
        return found.most_common(1)[0][0]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    rename = _suggested_renames(rows, columns)
    pairs = ", ".join(f"{old}: {new}" for old, new in rename.items())
    hint = f"Perhaps this source needs `columns: {{{pairs}}}`. " if rename else ""
    known = "; ".join(f"{name.value}: {', '.join(needed)}" for name, needed in COLUMNS.items())
    raise DataError(
        f"{source}: the rows have no format that fxtune knows. Their columns: {', '.join(columns) or 'none'}. "
        f"{hint}Known formats and the columns they need: {known}."
    )


def preference_columns(row: Mapping[str, Any], unused: Collection[str] = ()) -> str | None:
    """Why a row of preferences (DPO, KTO) is refused; None for any other row."""
    found = [
        column
        for column, value in row.items()
        if value is not None
        and column not in unused
        and (
            not {"chosen", "rejected"}.isdisjoint(column.lower().replace("-", "_").split("_"))
            or (column in ("label", "kto_tag") and isinstance(value, bool))
        )
    ]
    if not found:
        return None
    return (
        f"a row of preferences ({', '.join(found)}): it says which answers are better, and fxtune learns every answer "
        "that it is given. Make rows of the good answers alone, in one of the formats that fxtune reads"
    )


def row_format(row: dict[str, Any]) -> RowFormat | None:
    """The format of one row; None if it has none."""
    return _format_by_columns(row) or (RowFormat.prompt_completion if _pair(row) else None)


def _format_by_columns(row: dict[str, Any]) -> RowFormat | None:
    for name, columns in COLUMNS.items():
        if all(column in row for column in columns) and _values_fit(name, [row[column] for column in columns]):
            return name
    # Rows with more columns hold something else, such as the documents that were retrieved for a question.
    is_group = row.keys() <= {"documents", "labels"} and _is_chat(row.get("documents"))
    return RowFormat.group if is_group else None


def with_format_names(row: dict[str, Any]) -> dict[str, Any]:
    """`row`, with a pair of columns of PAIRS renamed to prompt and completion, unless its columns are a format."""
    pair = _pair(row)
    if pair is None or _format_by_columns(row) is not None:
        return row
    names = dict(zip(pair, COLUMNS[RowFormat.prompt_completion], strict=True))
    return {names.get(key, key): value for key, value in row.items()}


def _pair(row: Mapping[str, Any]) -> tuple[str, str] | None:
    """Those of PAIRS that a row has, both as text."""
    return next((pair for pair in PAIRS if all(isinstance(row.get(column), str) for column in pair)), None)


def _values_fit(name: RowFormat, values: list[Any]) -> bool:
    if name is RowFormat.messages:
        return _is_chat(values[0], "role")
    if name is RowFormat.sharegpt:
        return _is_chat(values[0], "from", "value")
    if name is RowFormat.prompt_completion:
        return all(isinstance(value, str) or _is_chat(value, "role") for value in values)
    if name is RowFormat.tokens:
        return isinstance(values[0], list) and bool(values[0]) and isinstance(values[0][0], int)
    return all(isinstance(value, str) for value in values)


def _is_chat(value: Any, *keys: str) -> bool:
    """Whether `value` is a non-empty list of objects that have all `keys`, or such a list as a JSON string."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return False
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(turn, dict) and all(key in turn for key in keys) for turn in value)


def _suggested_renames(rows: list[dict[str, Any]], columns: list[str]) -> dict[str, str]:
    """The `columns` setting that may make these rows readable; empty if there is no guess."""
    for column in columns:
        value = next((row[column] for row in rows if row.get(column)), None)
        if _is_chat(value, "role") and column != "messages":
            return {column: "messages"}
        if _is_chat(value, "from", "value") and column != "conversations":
            return {column: "conversations"}
    rename: dict[str, str] = {}
    for wanted in ("prompt", "completion"):
        found = _closest_column(wanted, [column for column in columns if column not in rename])
        if found is not None:
            rename[found] = wanted
    if len(rename) == 2:
        return {old: new for old, new in rename.items() if old != new}
    found = _closest_column("text", columns)
    return {found: "text"} if found not in (None, "text") else {}


def _closest_column(wanted: str, columns: list[str]) -> str | None:
    lower = {column.lower(): column for column in columns}
    for name in (wanted, *SYNONYMS[wanted]):
        if name in lower:
            return lower[name]
    return nearest(wanted, columns)
