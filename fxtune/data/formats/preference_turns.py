"""A chat in `conversations` or `messages`, and two answers to it in `chosen` and `rejected`, as ShareGPT has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fxtune.data.formats.chat_format import LIST_KEYS, add_answer, is_chat
from fxtune.data.formats.messages import MessagesFormat
from fxtune.data.formats.pair_format import CHOSEN, KNOWN_COLUMNS, REJECTED, PairFormat, is_answer
from fxtune.data.formats.row_format import OPEN, Conversation
from fxtune.data.formats.values import RowError


class PreferenceTurnsFormat(PairFormat):
    name = "preference_turns"
    columns = ("conversations", CHOSEN, REJECTED)
    known_columns = KNOWN_COLUMNS | {*LIST_KEYS, "prompt"}
    needs_template = True

    def fits(self, row: Mapping[str, Any]) -> bool:
        chat = next((row[key] for key in LIST_KEYS if row.get(key)), None)
        is_prompt = is_chat(chat, "role") or is_chat(chat, "from", "value")
        return is_prompt and is_answer(row.get(CHOSEN)) and is_answer(row.get(REJECTED))

    def sides(self, row: Mapping[str, Any]) -> tuple[Conversation, Conversation]:
        chats = MessagesFormat().turns(row), MessagesFormat().turns(row)
        for chat, column in zip(chats, self.answers, strict=True):
            if chat.messages[-1]["role"] == "assistant" and OPEN not in chat.messages[-1]:
                raise RowError(
                    f"{chat.places[-1]} is an answer, and chosen and rejected are other answers: end the chat with "
                    "its question; or, if both go on with it, set its `prefix: true`"
                )
            add_answer(chat, row.get(column), column)
        return chats
