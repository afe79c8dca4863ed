"""All row formats, in the order in which they are tried on a row, and the detection of formats.

To add a format: a file beside this one (a format of pairs: preferences.py), and a line in FORMATS.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from fxtune.data.formats import preferences, shapes
from fxtune.data.formats.alpaca import AlpacaFormat
from fxtune.data.formats.candidates import CandidatesFormat
from fxtune.data.formats.chat_format import LIST_KEYS, is_chat
from fxtune.data.formats.embedding import EmbeddingFormat
from fxtune.data.formats.group import GroupFormat
from fxtune.data.formats.kto import KTOFormat
from fxtune.data.formats.labelled import LabelledFormat
from fxtune.data.formats.messages import MessagesFormat, ShareGPTFormat
from fxtune.data.formats.pair_format import is_answer
from fxtune.data.formats.prompt import PromptFormat
from fxtune.data.formats.prompt_completion import PromptCompletionFormat
from fxtune.data.formats.row_format import RowFormat
from fxtune.data.formats.text import TextFormat
from fxtune.data.formats.tokens import TokensFormat
from fxtune.data.formats.values import RowError, short, type_name
from fxtune.errors import DataError, nearest
from fxtune.plugins import ROW_FORMATS

AUTO = "auto"
"""With this `format` of a source, fxtune detects the format from the rows."""

FORMATS: dict[str, RowFormat] = {
    format.name: format
    for format in (
        preferences.PreferenceChatsFormat(),  # preferences come first: later formats would read one answer alone
        preferences.PreferenceTurnsFormat(),
        preferences.PreferenceMessagesFormat(),
        preferences.PreferenceInstructionFormat(),
        preferences.PreferenceFormat(),
        KTOFormat(),
        EmbeddingFormat(),
        MessagesFormat(),
        ShareGPTFormat(),
        PromptCompletionFormat(),
        AlpacaFormat(),
        TokensFormat(),
        TextFormat(),  # comes late, because many chat datasets also have the rendered text
        GroupFormat(),
        CandidatesFormat(),
        LabelledFormat(),  # last: without an objective for labels, a label says nothing
        PromptFormat(),
    )
}
"""The formats by name. If several formats fit a row, the first one counts."""

ROW_FORMATS.reserve(FORMATS)

PAIRS = (("question", "answer"), ("prompt", "response"))
"""Texts in columns with these names are a prompt and a completion. Other names need the source's `columns`."""
SYNONYMS = {
    "prompt": ("question", "query", "problem", "input", "instruction", "source", "user"),
    "completion": ("answer", "response", "output", "solution", "target", "reply", "assistant"),
    "text": ("content", "body", "document", "raw_content", "code", "article", "caption"),
}


def detect_format(rows: list[dict[str, Any]], source: str, renamed: Mapping[str, str] = {}) -> RowFormat:
    """The most frequent format of `rows`. If no row has one, raises DataError, which suggests columns to rename.
    `renamed`: the source's `columns`, which `rows` have under their new names."""
    found = Counter(format.name for format in map(row_format, rows) if format is not None)
    if found:
        return FORMATS[found.most_common(1)[0][0]]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    rename = suggested_columns(rows, columns)
    for name in () if rename else LIST_KEYS:
        if (value := next((row[name] for row in rows if row.get(name) is not None), None)) is not None:
            raise DataError(
                f"{source}: `{name}` is {type_name(value)} ({short(value)}), and must be a list of turns: "
                "[{role: user, content: ...}, {role: assistant, content: ...}]."
            )
    in_file = {name: name for name in columns} | {new: old for old, new in renamed.items()}
    pairs = ", ".join(f"{in_file.get(old, old)}: {new}" for old, new in rename.items())
    hint = f"Perhaps this source needs `columns: {{{pairs}}}`. " if rename else ""
    known = "; ".join(f"{format.name}: {', '.join(format.columns)}" for format in FORMATS.values())
    raise DataError(
        f"{source}: the rows have no format that fxtune knows. "
        f"Their columns: {', '.join(in_file[name] for name in columns) or 'none'}. "
        f"{hint}Known formats and the columns they need: {known}."
    )


def preference_columns(row: Mapping[str, Any], unused: Collection[str] = ()) -> str | None:
    """If `row` has columns of preferences (DPO, KTO): the message with which a format that does not read
    preferences refuses it. Otherwise None. `unused`: columns to ignore."""
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
    wrong = next((name for name in found if name in ("chosen", "rejected") and not is_answer(row[name])), None)
    if wrong is not None:
        return (
            f"`{wrong}` is {type_name(row[wrong])}, and a pair has one answer there: a text, or the messages of one. "
            "Make a row for each answer, with the same prompt"
        )
    format = row_format(row)
    way = "rename its columns to `prompt`, `chosen` and `rejected` (the source's `columns`), and set objective=dpo"
    if {"chosen", "rejected"} <= set(found) and row.get("prompt") is None:
        way = "give rows with `prompt`, `chosen` and `rejected` (there is no `prompt` now), and set objective=dpo"
    if format is not None and format.answers:
        way = f"set objective={learned_by(format)}, and the source's `format: {format.name}`"
    return (
        f"a row of preferences ({', '.join(found)}): it says which answers are better, and each answer would be "
        f"learned alike. To learn from preferences, {way}; or make rows of the good answers alone"
    )


def learned_by(format: RowFormat) -> str:
    """The objective that error messages suggest for a format of preferences."""
    return "dpo" if len(format.answers) == 2 else "kto"


def row_format(row: Mapping[str, Any]) -> RowFormat | None:
    """The first format that fits a row; None if no format does."""
    try:
        return _by_columns(with_format_names(dict(row)))
    except RowError:
        return None


def _by_columns(row: Mapping[str, Any]) -> RowFormat | None:
    return next((format for format in FORMATS.values() if format.fits(row)), None)


def with_format_names(row: dict[str, Any], unused: Collection[str] = (), images: bool = False) -> dict[str, Any]:
    """Convert a row in another common shape to a row that a format reads (shapes.py). Other rows stay as they are.
    `unused`: columns to ignore. `images`: whether the model reads images. Raises RowError."""
    if (format := _by_columns(row)) is None:
        row = _renamed(row) or row
    used = given = {key: value for key, value in row.items() if key not in unused} if unused else row
    format = _by_columns(used) if format is None or unused else format
    if format is None:
        used = _lifted(used) or shapes.best_and_worst(used) or used
    used = shapes.from_api(used, format is not None) or used
    used = (images and shapes.with_mark(used)) or used
    return row if used is given else used


def _renamed(row: Mapping[str, Any]) -> dict[str, Any] | None:
    names = next((names for names in PAIRS if all(isinstance(row.get(name), str) for name in names)), ())
    new = dict(zip(names, ("prompt", "completion"), strict=False))
    return {new.get(key, key): value for key, value in row.items()} if names else None


def _lifted(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """If exactly one column holds an object with a chat, or with a prompt and an answer: the row with the object's
    columns in place of this column. Otherwise None."""
    objects = {key: with_format_names(value) for key, value in row.items() if isinstance(value, dict)}
    formats = {key: _by_columns(inner) for key, inner in objects.items()}
    held = [key for key, format in formats.items() if format is not None and (format.is_chat or format.answers)]
    if len(held) != 1 or not row.keys().isdisjoint(objects[held[0]]) or any(map(is_chat, row.values())):
        return None
    return {key: value for key, value in row.items() if key not in held} | objects[held[0]]


def suggested_columns(rows: list[dict[str, Any]], columns: list[str]) -> dict[str, str]:
    """The `columns` setting that may make these rows readable; empty if there is no guess."""
    values = {column: next((row[column] for row in rows if row.get(column)), None) for column in columns}
    objects = {column: value for column, value in values.items() if isinstance(value, dict)}
    inner = {f"{column}.{key}": held for column, value in objects.items() for key, held in value.items()}
    for column, value in (values | inner).items():
        if is_chat(value, "role") and column != "messages":
            answer = _closest_column("completion", [other for other in columns if other != column])
            return {answer: "completion"} if answer and column == "prompt" else {column: "messages"}
        if is_chat(value, "from", "value") and column != "conversations":
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
