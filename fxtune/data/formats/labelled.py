"""A text with a label: a class, several classes, or a number.

    {"text": "Win a prize now", "label": "spam"}                     one class
    {"text": "...", "label": ["toxic", "insult"]}                    several classes, or none: []
    {"premise": "...", "hypothesis": "...", "label": 0}              two texts, as in GLUE
    {"messages": [...], "label": 0.7}                                a chat, with or without an answer

The name of a label is its text. A number has one name, however it is written: 1, 1.0, "1" and "1.0" are "1". Several
classes are written as the JSON list of their sorted names.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from fxtune.data.formats.chat_format import LIST_KEYS
from fxtune.data.formats.messages import MessagesFormat, ShareGPTFormat
from fxtune.data.formats.row_format import Content, Conversation, Labelled, LearnConfig, PlainText, RowFormat
from fxtune.data.formats.values import RowError, parse_json, require_text, require_words, short, type_name

LABELS = ("label", "labels")
PAIRS = (
    *(("text", "text_pair"), ("sentence1", "sentence2"), ("premise", "hypothesis"), ("question1", "question2")),
    *(("question", "sentence"), ("question", "passage"), ("text1", "text2"), ("query", "passage")),
)
"""Names of the columns of two texts, as in GLUE, SuperGLUE and sentence-transformers."""
TEXTS = ("text", "sentence", "content", "review", "comment", "comment_text", "tweet", "question", "title")
"""Names of the column of one text; the first one counts."""
CHATS = (MessagesFormat(needs_answer=False), ShareGPTFormat(needs_answer=False))
NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?")


class LabelledFormat(RowFormat):
    name = "labelled"
    columns = ("text", "label")
    known_columns = frozenset((*LABELS, "text", "text_pair", "idx", "label_text", "label_name", *LIST_KEYS))
    is_group = True
    as_tokenized = True
    is_question = False
    nothing_learned = "no row has a label"

    def fits(self, row: Mapping[str, Any]) -> bool:
        return any(name in row for name in LABELS) and (bool(_texts(row)) or any(chat.fits(row) for chat in CHATS))

    def read(self, row: Mapping[str, Any], learn: LearnConfig, unused: Collection[str] = ()) -> Content:
        given = next((row[name] for name in LABELS if row.get(name) is not None), None)
        if given is None:
            raise RowError(_lacking(row, LABELS, "a word, a number or a list of them"))
        label = label_name(given)
        chat = next((chat for chat in CHATS if chat.fits(row)), None)
        if chat is not None:
            content = chat.read(row, learn, unused)
            assert isinstance(content, Conversation)
            return Labelled(content, label)
        if not (names := _texts(row)):
            raise RowError(_lacking(row, TEXTS, "a string"))
        texts = [require_words(row[name], name) for name in names]
        second = texts[1] if len(texts) > 1 else None
        return Labelled(PlainText(texts[0], second=second, as_tokenized=True), label)


def _texts(row: Mapping[str, Any]) -> tuple[str, ...]:
    """The columns of the row's texts: two, one or none."""
    pair = next((names for names in PAIRS if all(isinstance(row.get(name), str) for name in names)), ())
    return pair or tuple(name for name in TEXTS if isinstance(row.get(name), str))[:1]


def _lacking(row: Mapping[str, Any], names: Sequence[str], wanted: str) -> str:
    """The reason why no column of `names` can be read."""
    if named := next((name for name in names if name in row), None):
        return f"{named} is {type_name(row[named])}, not {wanted}"
    columns = ", ".join(map(short, row))
    return f"the row has no `{names[0]}`; its columns are {columns}, and the source's `columns` renames columns"


def label_name(label: Any) -> str:
    """The name of a label. Raises RowError for a label that has none."""
    if isinstance(label, str) and label.lstrip().startswith("["):
        label = parse_json(label, "label")
    if isinstance(label, (list, tuple)):
        return json.dumps(sorted({label_name(each) for each in label}), ensure_ascii=False)
    if isinstance(label, bool):
        return str(label).lower()
    if isinstance(label, str):
        text = require_text(label, "label").strip()
        if not text or text.lower() == "nan":
            raise RowError(f"label is {text or 'empty'}: a row needs a number or a word")
        if not NUMBER.fullmatch(text):
            return text
        label = float(text)
        if math.isfinite(label) and text.lstrip("-").isdigit():
            label = int(text)  # a float has 16 digits, and an id may have more
    if not isinstance(label, (int, float)):
        raise RowError(f"label is {type_name(label)}, not a word, a number or a list of them")
    if isinstance(label, float) and not math.isfinite(label):
        raise RowError(f"label is {short(label)}: a row needs a finite number or a word")
    return str(int(label)) if label == int(label) else np.format_float_positional(label)


def classes_of(name: str) -> list[str]:
    """The classes that the name of a label stands for."""
    if not name.startswith("["):
        return [name]
    classes: list[str] = json.loads(name)
    return classes
