"""Chats in ShareGPT's format: `conversations: [{from, value}, ...]`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fxtune.data.formats.chat_format import is_chat
from fxtune.data.formats.messages import MessagesFormat


class ShareGPTFormat(MessagesFormat):
    """The format `messages` with other names of columns, keys and roles. A row may mix both kinds of names."""

    name = "sharegpt"
    columns = ("conversations",)

    def fits(self, row: Mapping[str, Any]) -> bool:
        return is_chat(row.get("conversations"), "from", "value")
