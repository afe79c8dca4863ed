"""Brings tool calls into the form that a chat template takes: arguments as an object or as text, short ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any


@dataclass(frozen=True)
class CallStyle:
    """The form in which a template takes tool calls, measured on a probe."""

    is_written: bool = True
    arguments_as_text: bool = False
    """Arguments are a JSON string (DeepSeek), not an object."""
    content: tuple[str | None, ...] = ()
    """The content to give a turn with calls that has none: () leaves the key out, (None,) gives null (DeepSeek), ("",)
    gives an empty text."""
    short_ids: bool = False
    """Each call and its result have an id of nine letters and digits (Mistral)."""


def calling(name: str, arguments: dict[str, Any] | None) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call]}


def renamed(call: dict[str, Any], name: str) -> dict[str, Any]:
    return {**call, "function": {**call["function"], "name": name}}


def with_call_style(messages: Sequence[dict[str, Any]], style: CallStyle) -> list[dict[str, Any]]:
    """The messages with their calls in the form `style`. A result without an id gets the id of the first call that
    still waits for a result."""
    adapted = []
    waiting: list[str] = []  # ids of calls whose results have not come yet
    for position, message in enumerate(messages):
        message = dict(message)
        if "tool_calls" in message:
            if not message.get("content"):
                message.pop("content", None)
                if style.content:
                    message["content"] = style.content[0]
            message["tool_calls"] = [dict(call) for call in message["tool_calls"]]
            for number, call in enumerate(message["tool_calls"]):
                arguments = call["function"].get("arguments")
                if style.arguments_as_text and not isinstance(arguments, str):
                    text = json.dumps({} if arguments is None else arguments, ensure_ascii=False)
                    call["function"] = {**call["function"], "arguments": text}
                if style.short_ids:
                    call["id"] = _short_id(call.get("id") or f"{position} {number}")
                    waiting.append(call["id"])
        elif message["role"] == "tool" and style.short_ids:
            given = message.get("tool_call_id")
            message["tool_call_id"] = (
                _short_id(given) if given else waiting[0] if waiting else _short_id(str(position))
            )
            waiting = [call for call in waiting if call != message["tool_call_id"]]
        adapted.append(message)
    return adapted


def _short_id(written: Any) -> str:
    text = str(written)
    is_short = len(text) == 9 and text.isascii() and text.isalnum()
    return text if is_short else blake2b(text.encode(errors="replace"), digest_size=8).hexdigest()[:9]
