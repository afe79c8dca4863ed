"""Plain text in a column `text`; every token is supervised."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from fxtune.data.formats.chat_format import LIST_KEYS
from fxtune.data.formats.row_format import Content, LearnConfig, PlainText, RowFormat
from fxtune.data.formats.values import require_words


class TextFormat(RowFormat):
    name = "text"
    columns = ("text",)
    known_columns = frozenset(("text", "title", "short_book_title", *LIST_KEYS, "prompt", "completion"))
    """Chats and prompts beside the text count as known, because the user chose to train on the text."""
    is_question = False
    nothing_learned = "no text has a token"

    def fits(self, row: Mapping[str, Any]) -> bool:
        return isinstance(row.get("text"), str)

    def read(self, row: Mapping[str, Any], learn: LearnConfig, unused: Collection[str] = ()) -> Content:
        return PlainText(require_words(row.get("text"), "text"))
