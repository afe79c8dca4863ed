"""A prompt and its completion: `prompt`, `completion`, two strings or two lists of messages."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from fxtune.data.formats.chat_format import VARIABLES, ChatFormat, add_answer, add_prompt, is_chat, require_answer
from fxtune.data.formats.image_parts import COLUMNS, for_chats
from fxtune.data.formats.row_format import Content, Conversation, LearnConfig, PlainText
from fxtune.data.formats.values import RowError, require_text


class PromptCompletionFormat(ChatFormat):
    """A row with a list is a chat. Two strings are a text without a chat template. Only the completion is learned."""

    name = "prompt_completion"
    columns = ("prompt", "completion")
    known_columns = frozenset(("prompt", "completion", *COLUMNS, VARIABLES, "text"))

    def fits(self, row: Mapping[str, Any]) -> bool:
        values = [row.get(column) for column in self.columns]
        return all(isinstance(value, str) or is_chat(value, "role") for value in values)

    def read(self, row: Mapping[str, Any], learn: LearnConfig, unused: Collection[str] = ()) -> Content:
        prompt, completion = row.get("prompt"), row.get("completion")
        if not (isinstance(prompt, str) and isinstance(completion, str)):
            return super().read(row, learn, unused)
        if wrong := next((name for name in (VARIABLES, *COLUMNS) if row.get(name) and name not in unused), None):
            raise RowError(for_chats(wrong, "`instruction` and `output`"))
        prompt, completion = require_text(prompt, "prompt"), require_text(completion, "completion")
        require_answer(completion, "completion")
        return PlainText(prompt + completion, len(prompt))

    def turns(self, row: Mapping[str, Any]) -> Conversation:
        """The chat of a row whose prompt or completion, or both, are lists of messages. No turn of the prompt is
        learned. If the prompt ends with an assistant turn, the completion continues this turn."""
        chat = Conversation()
        add_prompt(chat, row.get("prompt"))
        add_answer(chat, row.get("completion"), "completion")
        answers = zip(chat.messages, chat.places, strict=True)
        if not any(message["role"] == "assistant" and place.startswith("completion") for message, place in answers):
            raise RowError("no assistant turn in completion")
        return chat
