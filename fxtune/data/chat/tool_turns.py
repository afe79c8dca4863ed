"""The turns of an answer that calls tools: what the model called, and the tokens of the results.

The forms of both are measured on the chat template. Tokens that the model wrote are never decoded and encoded again
(TRL#5242). The results add tokens to them: from the end of the turn to where the model writes again.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

from fxtune.data.chat.calls import calling, renamed, with_call_style
from fxtune.data.chat.rewriting import PLAIN_TOOL
from fxtune.data.chat.template import unused_characters
from fxtune.data.chat.template_source import ChatTemplates
from fxtune.data.config import DataConfig
from fxtune.data.formats.values import RowError
from fxtune.errors import ConfigError

ToolCall: TypeAlias = tuple[str, dict[str, Any] | None]
"""The name of a tool, and its arguments. None: they are no JSON object."""
USER = {"role": "user", "content": "?"}


class ToolTurns:
    """Reads calls, and encodes results. Raises ConfigError for a chat template that does not fit."""

    def __init__(self, tokenizer: Any, data: DataConfig) -> None:
        templates = ChatTemplates(tokenizer, data.chat_template, data.chat_template_kwargs, data.template_time, None)
        self.tokenizer, (self.template, _, rewriting) = tokenizer, templates.get(with_tools=True)
        self.mark, _ = unused_characters(self.template.source)
        style, (between, self.tail), head = self.template.call_style, self.template.around_arguments, self._head()
        thought = calling("f", {"a": 1}) | {"reasoning_content": "r"}
        chat = with_call_style([USER, thought, {"role": "tool", "content": "r"}], style)
        if not (style.is_written and head and between) or style.short_ids:
            problem = "its calls have no form that fxtune reads"
        elif self.mark not in self.template.render([USER], [renamed(PLAIN_TOOL, self.mark)])[0]:
            problem = "it does not write the tools that the model may call"
        elif rewriting.turns(chat, [False, True, False]):
            problem = "it writes a turn otherwise when results of tools follow"
        else:
            parts = (r"\s*".join(map(re.escape, part.split())) for part in (head, between))
            self._call = re.compile(r"\s*([\w.:-]+?)\s*".join(parts))
            self.end: int = tokenizer(self.tail, add_special_tokens=False)["input_ids"][-1]
            """The token that ends a turn with calls."""
            return
        raise ConfigError(f"data.chat_template: {problem}. Name another, or remove the sources' environment.")

    def _head(self) -> str:
        """The text before a tool's name that is the same for a first and a second call."""
        heads, prompt = list[str](), self.template.render([USER], prompt=True)[0]
        for names in ([self.mark], ["f", self.mark]):
            turn = {"role": "assistant", "tool_calls": [calling(name, {})["tool_calls"][0] for name in names]}
            with suppress(RowError):  # some templates write one call only
                text, _ = self.template.render(with_call_style([USER, turn], self.template.call_style))
                heads += [part.removeprefix(prompt)[::-1] for part in text.split(self.mark)[:-1]]
        return os.path.commonprefix(heads)[::-1].strip()  # noqa: RUF071 - of characters

    def read(self, ids: Sequence[int]) -> tuple[dict[str, Any], list[ToolCall]]:
        """The message of a turn, and its calls."""
        decode = partial(self.tokenizer.decode, ids, clean_up_tokenization_spaces=False)
        message, text = {"role": "assistant", "content": decode(skip_special_tokens=True)}, decode()
        text = text.rpartition("</think>")[2]
        calls = [(found[1], _object(text[found.end() :])) for found in self._call.finditer(text)]
        if calls:
            message["tool_calls"] = [calling(*call)["tool_calls"][0] for call in calls]
        return message, calls

    def write(self, results: Sequence[tuple[str, str]]) -> tuple[list[dict[str, Any]], list[int]]:
        """The messages of (tool, result) of each call, and the tokens between the turn that called and the next."""
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
