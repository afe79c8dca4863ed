"""What a row means: the row formats that people have, and how one is recognised.

| format            | columns                                                                    |
|-------------------|----------------------------------------------------------------------------|
| messages          | `messages`: [{role, content}, ...] (OpenAI), optionally `tools`            |
| sharegpt          | `conversations`: [{from, value}, ...]                                      |
| prompt_completion | `prompt`, `completion`: two strings, or two lists of messages              |
| alpaca            | `instruction`, `output`, optionally `input`                                |
| tokens            | `input_ids`, optionally `labels` (-100: not supervised) or `assistant_masks` (0 or 1) |
| text              | `text`: every token is supervised                                          |
"""

from __future__ import annotations

from collections import Counter
from enum import Enum
from typing import Any

from fxtune.errors import DataError, nearest


class RowFormat(str, Enum):
    auto = "auto"
    messages = "messages"
    sharegpt = "sharegpt"
    alpaca = "alpaca"
    prompt_completion = "prompt_completion"
    text = "text"
    tokens = "tokens"


COLUMNS = {
    RowFormat.messages: ("messages",),
    RowFormat.sharegpt: ("conversations",),
    RowFormat.prompt_completion: ("prompt", "completion"),
    RowFormat.alpaca: ("instruction", "output"),
    RowFormat.tokens: ("input_ids",),
    RowFormat.text: ("text",),
}
"""The columns that a format cannot do without; in this order, since a chat dataset often carries its rendered `text` too."""

OTHER_NAMES = {
    "prompt": ("question", "query", "problem", "input", "instruction", "source", "user"),
    "completion": ("answer", "response", "output", "solution", "target", "reply", "assistant", "chosen"),
    "text": ("content", "body", "document", "raw_content", "code", "article"),
}


def detect(rows: list[dict[str, Any]], where: str) -> RowFormat:
    """The format of most of `rows` (a source's first ones). Raises DataError, with the columns seen and what could be renamed."""
    found = Counter(one for one in map(recognise, rows) if one is not None)
    if found:
        return found.most_common(1)[0][0]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    known = "; ".join(f"{name.value}: {', '.join(needed)}" for name, needed in COLUMNS.items())
    raise DataError(
        f"{where}: the rows have no format that fxtune knows. Their columns: {', '.join(columns) or 'none'}. "
        f"{_hint(rows, columns)}Known formats and the columns they need: {known}."
    )


def recognise(row: dict[str, Any]) -> RowFormat | None:
    """The format of one row, None where it has none."""
    return next(
        (name for name, needed in COLUMNS.items() if all(key in row for key in needed) and _fits(name, row)), None
    )


def _fits(name: RowFormat, row: dict[str, Any]) -> bool:
    first = row[COLUMNS[name][0]]
    if name is RowFormat.messages:
        return _turns(first, "role")
    if name is RowFormat.sharegpt:
        return _turns(first, "from", "value")
    if name is RowFormat.prompt_completion:
        return all(isinstance(row[key], str) or _turns(row[key], "role") for key in ("prompt", "completion"))
    if name is RowFormat.tokens:
        return isinstance(first, list) and bool(first) and isinstance(first[0], int)
    return all(isinstance(row[key], str) for key in COLUMNS[name])


def _turns(value: Any, *keys: str) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(turn, dict) and all(key in turn for key in keys) for turn in value)
    )


def _hint(rows: list[dict[str, Any]], columns: list[str]) -> str:
    """What `columns` of the source would make these rows readable, where that can be guessed."""
    rename: dict[str, str] = {}
    for column in columns:
        seen = next((row[column] for row in rows if row.get(column)), None)
        if _turns(seen, "role") and column != "messages":
            return _advice({column: "messages"})
        if _turns(seen, "from", "value") and column != "conversations":
            return _advice({column: "conversations"})
    for ours in ("prompt", "completion"):
        theirs = _closest(ours, [column for column in columns if column not in rename])
        if theirs is not None:
            rename[theirs] = ours
    if len(rename) == 2:
        return _advice({theirs: ours for theirs, ours in rename.items() if theirs != ours})
    theirs = _closest("text", columns)
    return _advice({theirs: "text"}) if theirs is not None else ""


def _closest(ours: str, columns: list[str]) -> str | None:
    lower = {column.lower(): column for column in columns}
    for name in (ours, *OTHER_NAMES[ours]):
        if name in lower:
            return lower[name]
    return nearest(ours, columns)


def _advice(rename: dict[str, str]) -> str:
    if not rename or all(theirs == ours for theirs, ours in rename.items()):
        return ""
    pairs = ", ".join(f"{theirs}: {ours}" for theirs, ours in rename.items())
    return f"Perhaps this source needs `columns: {{{pairs}}}`. "
