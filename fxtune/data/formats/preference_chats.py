"""Two whole chats with the same beginning, in `chosen` and `rejected`: lists of messages, or texts as in HH-RLHF.

Rows of UltraFeedback also have `prompt` and `messages`, which repeat a part of the chats.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fxtune.data.formats.chat_format import LIST_KEYS, add_turns
from fxtune.data.formats.pair_format import CHOSEN, KNOWN_COLUMNS, REJECTED, PairFormat, is_whole_chat
from fxtune.data.formats.row_format import Conversation
from fxtune.data.formats.values import RowError, require_text

TURN = re.compile(r"\n\n(Human|Assistant):")
TURN_ROLES = {"Human": "user", "Assistant": "assistant"}


class PreferenceChatsFormat(PairFormat):
    name = "preference_chats"
    columns = (CHOSEN, REJECTED)
    known_columns = KNOWN_COLUMNS | {*LIST_KEYS, "prompt"}
    needs_template = True

    def fits(self, row: Mapping[str, Any]) -> bool:
        answers = [row.get(column) for column in self.columns]
        if all(map(is_whole_chat, answers)):
            return True
        return all(isinstance(answer, str) and TURN.match(_prompt_text(row) + answer) for answer in answers)

    def sides(self, row: Mapping[str, Any]) -> tuple[Conversation, Conversation]:
        chosen, rejected = (_chat(row, column) for column in self.columns)
        for column in ("prompt", *LIST_KEYS):
            is_read = column == "prompt" and isinstance(row.get(CHOSEN), str) and _prompt_text(row)
            if row.get(column) and not is_read and not _repeats(row[column], column, chosen):
                raise RowError(
                    f"{column} is outside the complete chat `chosen`, so its content is not read. If it is not "
                    f"needed, set the source's `unused: [{column}]`"
                )
        return chosen, rejected


def _repeats(value: Any, column: str, chat: Conversation) -> bool:
    """Whether `value`, from a column, repeats a part of the chat: its first turns, or the text of a turn."""
    if isinstance(value, str):
        return any(value.strip() in message.get("content", "") for message in chat.messages)
    repeated = Conversation()
    add_turns(repeated, value, column)
    return chat.messages[: len(repeated.messages)] == repeated.messages


def _prompt_text(row: Mapping[str, Any]) -> str:
    """The column `prompt` if it is a text that begins with a turn, as in HH-RLHF; otherwise empty."""
    prompt = row.get("prompt")
    return prompt if isinstance(prompt, str) and TURN.match(prompt) else ""


def _chat(row: Mapping[str, Any], column: str) -> Conversation:
    chat, answer = Conversation(), row.get(column)
    if not isinstance(answer, str):
        add_turns(chat, answer, column)
        return chat
    text = _prompt_text(row) + require_text(answer, column)
    before, *parts = TURN.split(text)
    if before or not parts:
        raise RowError(
            f"{column} is a text without turns: expected a list of messages, or a text that begins with a "
            "blank line and `Human:`"
        )
    for index in range(0, len(parts), 2):
        place = f"{column}, turn {index // 2 + 1}"
        chat.add({"role": TURN_ROLES[parts[index]], "content": parts[index + 1].strip()}, place)
    return chat
