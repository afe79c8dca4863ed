"""Chats in OpenAI's format."""

from __future__ import annotations

from typing import Any

import pytest

from fxtune.data.formats.messages import MessagesFormat
from fxtune.data.formats.row_format import Conversation, LearnConfig
from fxtune.data.formats.values import RowError

USER, ANSWER = {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}


def test_a_column_system_begins_the_chat_that_has_none() -> None:
    chat = MessagesFormat().read({"messages": [USER, ANSWER], "system": "s"}, LearnConfig())
    assert isinstance(chat, Conversation)
    assert chat.messages[0] == {"role": "system", "content": "s"}
    own = {"role": "system", "content": "own"}
    chat = MessagesFormat().read({"messages": [own, USER, ANSWER], "system": "s"}, LearnConfig())
    assert isinstance(chat, Conversation)
    assert chat.messages[0]["content"] == "own"


def test_a_column_named_unused_is_not_read() -> None:
    chat = MessagesFormat().read(
        {"messages": [USER, ANSWER], "tools": [{"name": "f"}]}, LearnConfig(), unused=["tools"]
    )
    assert isinstance(chat, Conversation)
    assert chat.tools is None


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"text": "u"}, "no list of messages"),
        ({"messages": [USER]}, "no assistant turn"),
        ({"messages": []}, "messages is empty"),
    ],
)
def test_rows_that_cannot_be_used_have_a_reason(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(RowError, match=reason):
        MessagesFormat().read(row, LearnConfig())
