"""Finds the answers that a chat template writes differently than in sampling, by trials on short chats.

In sampling an answer is always the last turn. Once other turns follow, some templates change the text up to the
answer's end: they drop the reasoning of earlier answers, end only the last turn with a certain token, or move the
tools behind earlier turns. Each shape of a chat (its roles, and which parts its messages have) is tried once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from fxtune.data.chat.template import ChatTemplate, Messages, Tools
from fxtune.data.chat.turns import supervised_spans
from fxtune.data.formats.chat_format import SYSTEM_ROLES
from fxtune.data.formats.values import RowError

MAX_SHAPES = 10_000
"""The results of about this many shapes are kept."""


class Rewriting:
    """Finds what a chat template rewrites. Picklable."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self._known: dict[tuple[Any, ...], bool] = {}

    def turns(self, messages: Messages, supervised: Sequence[bool], tools: Tools = None) -> list[int]:
        """The learned turns for which the template changes the text up to their end when more messages follow. A turn
        is tried with the messages up to the next learned turn, the last learned turn with all messages."""
        turns = [index for index, learned in enumerate(supervised) if learned]
        ends = sorted({*turns, len(messages) - 1}) if turns else []
        return [turn for turn, later in pairwise(ends) if self._try(self._is_rewritten, messages, turn, later, tools)]

    def asks_otherwise(self, messages: Messages, turn: int, tools: Tools = None) -> bool:
        """Whether a chat that ends with this turn does not begin with the prompt for the turn in sampling. (The prompt
        of DeepSeek-R1 opens a block of reasoning. Its template writes answers without such a block.)"""
        is_answer = messages[turn]["role"] == "assistant"
        return is_answer and self._try(self._asks_otherwise, messages, turn, turn, tools)

    def _is_rewritten(self, part: Messages, length: int, schemas: Tools) -> bool:
        learned = [index == length - 1 for index in range(length)]
        alone, ((_, end),) = supervised_spans(self.template, part[:length], learned, schemas)
        return not self.template.render(part, schemas)[0].startswith(alone[:end])

    def _asks_otherwise(self, part: Messages, length: int, schemas: Tools) -> bool:
        prompt, _ = self.template.render(part[: length - 1], schemas, prompt=True)
        return not self.template.render(part, schemas)[0].startswith(prompt)

    def _try(
        self, question: Callable[[Messages, int, Tools], bool], messages: Messages, turn: int, later: int, tools: Tools
    ) -> bool:
        """The result of question() for a short chat with made-up text: the system messages, and the messages from the
        question before `turn` up to `later`. question() also gets the number of messages up to `turn`, and tools.
        False if the template refuses the made-up text."""
        head = next((index for index, message in enumerate(messages) if message["role"] not in SYSTEM_ROLES), 0)
        begin = max((index for index in range(head, turn) if messages[index]["role"] == "user"), default=head)
        part = [*messages[:head], *messages[begin : later + 1]]
        length = head + turn - begin + 1
        key = (question.__name__, length, bool(tools), *map(_shape, part))
        if key not in self._known:
            if len(self._known) > MAX_SHAPES:
                self._known.clear()
            plain = [_plain(message, number) for number, message in enumerate(part)]
            try:
                self._known[key] = question(plain, length, [PLAIN_TOOL] if tools else None)
            except RowError:
                self._known[key] = False
        return self._known[key]


PLAIN_TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}},
}


def _shape(message: dict[str, Any]) -> tuple[Any, ...]:
    """The features of a message that a template may test, besides its words."""
    content, calls = message.get("content"), message.get("tool_calls", ())
    return (
        message["role"],
        None if content is None else bool(content.strip()),
        "content" in message,
        "</think>" in (content or ""),
        bool((message.get("reasoning_content") or "").strip()),
        "reasoning_content" in message,
        len(calls),
        isinstance(calls[0]["function"].get("arguments"), str) if calls else False,
        "tool_call_id" in message,
    )


def _plain(message: dict[str, Any], number: int) -> dict[str, Any]:
    """A message of the same shape with made-up text. Each message has another text, because Mistral's template finds
    the last question by comparing messages."""
    plain, content = {"role": message["role"]}, message.get("content")
    if "content" in message:
        plain["content"] = content and (
            f"<think>\nr\n</think>\n\na{number}" if "</think>" in content else f"a{number}"
        )
    if "reasoning_content" in message:
        plain["reasoning_content"] = plain["thinking"] = message["reasoning_content"].strip() and "r"
    if "tool_call_id" in message:
        plain["tool_call_id"] = "0" * 9
    if "tool_calls" in message:
        plain["tool_calls"] = [
            {
                "type": "function",
                "id": "0" * 9,
                "function": {"name": "f", "arguments": '{"a": 1}' if isinstance(arguments, str) else {"a": 1}},
            }
            for arguments in (call["function"].get("arguments") for call in message["tool_calls"])
        ]
    return plain
