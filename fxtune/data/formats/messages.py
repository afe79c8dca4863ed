"""Chats: lists of messages, in OpenAI's format or in ShareGPT's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fxtune.data.formats.chat_format import CHAT_COLUMNS, LIST_KEYS, SYSTEM_ROLES, ChatFormat, add_turns, is_chat
from fxtune.data.formats.row_format import Conversation
from fxtune.data.formats.values import RowError, require_text


class MessagesFormat(ChatFormat):
    """OpenAI's format: `messages: [{role, content}, ...]`, optionally `tools`."""

    name = "messages"
    columns = ("messages",)
    known_columns = CHAT_COLUMNS
    needs_template = has_lists = True

    def fits(self, row: Mapping[str, Any]) -> bool:
        return is_chat(row.get("messages"), "role")

    def turns(self, row: Mapping[str, Any]) -> Conversation:
        key = next((name for name in LIST_KEYS if row.get(name) is not None), None)
        if key is None:
            raise RowError("no list of messages: expected the key 'messages' or 'conversations'")
        chat = Conversation()
        add_turns(chat, row[key], key)
        system = row.get("system")
        if system is not None and chat.messages[0]["role"] not in SYSTEM_ROLES and require_text(system, "system"):
            chat.messages.insert(0, {"role": "system", "content": system})
            chat.places.insert(0, "system")
            chat.train_flags.insert(0, None)
        return chat


class ShareGPTFormat(MessagesFormat):
    """`conversations: [{from, value}, ...]`: the format `messages` with other names of columns, keys and roles. A row
    may mix both kinds of names."""

    name = "sharegpt"
    columns = ("conversations",)

    def fits(self, row: Mapping[str, Any]) -> bool:
        return is_chat(row.get("conversations"), "from", "value")
