"""The turns of an answer that calls tools: reads the calls of a turn, and writes the tokens of their results.

The chat template shows the forms of calls and results. Tokens that the model wrote are never decoded and encoded again
(TRL#5242). The tokens of results follow: from the end of the turn to the start of the model's next turn.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from fxtune.data.chat.calls import calling, renamed, with_call_style
from fxtune.data.chat.rewriting import PLAIN_TOOL
from fxtune.data.chat.template import unused_characters
from fxtune.data.chat.template_source import ChatTemplates
from fxtune.data.config import DataConfig
from fxtune.data.formats.values import RowError
from fxtune.errors import ConfigError

USER = {"role": "user", "content": "?"}
THOUGHT_ENDS = "</think>"


class ToolTurns:
    """Reads calls, and encodes results. Raises ConfigError for a chat template that does not fit."""

    def __init__(self, tokenizer: Any, data: DataConfig) -> None:
        templates = ChatTemplates(tokenizer, data.chat_template, data.chat_template_kwargs, data.template_time, None)
        self.tokenizer, (self.template, _, rewriting) = tokenizer, templates.get(with_tools=True)
        self.mark, _ = unused_characters(self.template.source)
        style, (between, self.tail), head = self.template.call_style, self.template.around_arguments, self._head()
        parts = (r"\s*".join(map(re.escape, part.split())) for part in (head, between))
        self._call = re.compile(r"\s*([\w.:-]+?)\s*".join(parts))
        self.end: int | None = next(iter(tokenizer(self.tail, add_special_tokens=False)["input_ids"][-1:]), None)
        """The token that ends a turn with calls."""
        tool, thought = renamed(PLAIN_TOOL, self.mark), calling("f", {"a": 1}) | {"reasoning_content": "r"}
        chat = with_call_style([USER, thought, {"role": "tool", "content": "r"}], style)
        with suppress(RowError, ValueError):
            is_read = style.is_written and not style.short_ids and head and between and self.write([("f", "r")])
            writes_tools = self.mark in self.template.render([USER], [tool])[0]
            if is_read and writes_tools and not rewriting.turns(chat, [False, True, False]):
                return
        raise ConfigError(
            "data.chat_template: turns with tools need a template that writes the tools, calls as JSON without ids, "
            "and results, and that writes a turn alike when results follow. Name one, or no environment."
        )

    def _head(self) -> str:
        """The text before a tool's name, if it is the same in a first and a second call: their common end."""
        heads, prompt = list[str](), self.template.render([USER], prompt=True)[0]
        for names in ([self.mark], ["f", self.mark]):
            turn = {"role": "assistant", "tool_calls": [calling(name, {})["tool_calls"][0] for name in names]}
            with suppress(RowError):  # some templates write one call only
                text, _ = self.template.render(with_call_style([USER, turn], self.template.call_style))
                heads += [part.removeprefix(prompt)[::-1] for part in text.split(self.mark)[:-1]]
        return os.path.commonprefix(heads)[::-1].strip()  # noqa: RUF071 - not paths

    def read(self, ids: Sequence[int]) -> tuple[dict[str, Any], list[tuple[str, Any]]]:
        """The message of a turn, and (name, arguments) of each call; arguments None: they are not a JSON object."""
        decode = partial(self.tokenizer.decode, ids, clean_up_tokenization_spaces=False)
        message, text = {"role": "assistant", "content": decode(skip_special_tokens=True)}, decode()
        text = text.partition(THOUGHT_ENDS)[2] if THOUGHT_ENDS in text else text
        calls = [(found[1], _object(text[found.end() :])) for found in self._call.finditer(text)]
        if calls:
            message["tool_calls"] = [calling(*call)["tool_calls"][0] for call in calls]
        return message, calls

    def write(self, results: Sequence[tuple[str, str]]) -> tuple[list[dict[str, Any]], list[int]]:
        """The messages of `results`, (tool, result) of each call, and the tokens up to the next turn."""
        special = [token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special]
        refused = str({"error": "the result has a special token"})
        safe = [(name, refused if any(token in text for token in special) else text) for name, text in results]
        turns = [{"role": "tool", "name": name, "content": text} for name, text in safe]
        chat = with_call_style([USER, calling(results[0][0], {"a": self.mark}), *turns], self.template.call_style)
        text, _ = self.template.render(chat, prompt=True)
        begin = text.index(self.tail, text.index(self.mark)) + len(self.tail)
        found = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        tokens = zip(found["input_ids"], found["offset_mapping"], strict=True)
        return turns, [token for token, (start, _) in tokens if start >= begin]


def _object(text: str) -> dict[str, Any] | None:
    """The JSON object with which `text` begins."""
    with suppress(ValueError, RecursionError):
        found, _ = json.JSONDecoder().raw_decode(text.lstrip())
        return found if isinstance(found, dict) else None
    return None
