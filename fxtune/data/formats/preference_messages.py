"""A chat in `messages`, and a second answer in `rejected_response` or `rejected_messages`, as in ms-swift's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fxtune.data.formats.chat_format import LIST_KEYS, add_answer, add_turns, is_chat
from fxtune.data.formats.messages import MessagesFormat
from fxtune.data.formats.pair_format import KNOWN_COLUMNS, PairFormat, is_whole_chat
from fxtune.data.formats.row_format import Conversation
from fxtune.data.formats.values import RowError, require_text

RESPONSE, MESSAGES = "rejected_response", "rejected_messages"


class PreferenceMessagesFormat(PairFormat):
    """`messages` ends with the chosen answer. The rejected answer replaces all turns after the last question, unless
    `rejected_messages` is a whole chat."""

    name = "preference_messages"
    columns = ("messages", RESPONSE)
    known_columns = KNOWN_COLUMNS | {*LIST_KEYS, RESPONSE, MESSAGES, "prompt"}
    needs_template = True
    answer_columns = (frozenset(LIST_KEYS), frozenset((RESPONSE, MESSAGES)))

    def fits(self, row: Mapping[str, Any]) -> bool:
        is_rejected = isinstance(row.get(RESPONSE), str) or is_chat(row.get(MESSAGES))
        return is_chat(row.get("messages"), "role") and is_rejected

    def sides(self, row: Mapping[str, Any]) -> tuple[Conversation, Conversation]:
        chosen, rejected = MessagesFormat().turns(row), MessagesFormat().turns(row)
        if RESPONSE in row and MESSAGES in row:
            raise RowError(f"{RESPONSE} and {MESSAGES} are two rejected answers; keep one column")
        if is_whole_chat(row.get(MESSAGES)):
            rejected = MessagesFormat().turns({**row, "messages": row[MESSAGES]})
            rejected.places = [place.replace("messages", MESSAGES, 1) for place in rejected.places]
            return chosen, rejected
        start = after_last_question(rejected)
        for turns in (rejected.messages, rejected.places, rejected.train_flags):
            del turns[start:]
        if RESPONSE in row:
            add_answer(rejected, require_text(row[RESPONSE], RESPONSE), RESPONSE)
        else:
            add_turns(rejected, row.get(MESSAGES), MESSAGES)
        return chosen, rejected


def after_last_question(chat: Conversation) -> int:
    """The number of messages from the first message to the last question; 0 if the chat has no question."""
    roles = [message["role"] for message in chat.messages]
    return len(roles) - roles[::-1].index("user") if "user" in roles else 0
