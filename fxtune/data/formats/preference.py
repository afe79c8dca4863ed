"""A prompt with two answers: `prompt`, `chosen`, `rejected`, as texts or as messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fxtune.data.formats.chat_format import add_answer, add_prompt, is_chat
from fxtune.data.formats.pair_format import CHOSEN, KNOWN_COLUMNS, REJECTED, PairFormat, is_answer, texts
from fxtune.data.formats.row_format import Conversation, PlainText
from fxtune.data.formats.values import RowError


class PreferenceFormat(PairFormat):
    """A row with a list is a chat. Three texts are plain text without a chat template, as in prompt_completion.py."""

    name = "preference"
    columns = ("prompt", CHOSEN, REJECTED)
    known_columns = KNOWN_COLUMNS | {"prompt"}

    def fits(self, row: Mapping[str, Any]) -> bool:
        prompt = row.get("prompt")
        is_prompt = isinstance(prompt, str) or is_chat(prompt, "role") or is_chat(prompt, "from")
        return is_prompt and is_answer(row.get(CHOSEN)) and is_answer(row.get(REJECTED))

    def sides(self, row: Mapping[str, Any]) -> tuple[Conversation, Conversation] | tuple[PlainText, PlainText]:
        if missing := [column for column in self.columns if row.get(column) is None]:
            raise RowError(f"there is no {missing[0]}: a pair has a prompt, a chosen and a rejected answer")
        if all(isinstance(row.get(column), str) for column in self.columns):
            return texts(row["prompt"], row)
        chats = Conversation(), Conversation()
        for chat, column in zip(chats, self.answers, strict=True):
            add_prompt(chat, row.get("prompt"))
            add_answer(chat, row.get(column), column)
        return chats
