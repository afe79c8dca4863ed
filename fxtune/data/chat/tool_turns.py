"""The turns of an answer that calls tools: what the model called, and the tokens of the results.

The forms of calls and results are measured on the chat template. Tokens that the model wrote are never decoded and
encoded again (TRL#5242): a result adds tokens to them, from the end of the turn to where the model writes again.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import MethodType
from typing import Any, TypeAlias

from fxtune.data.chat.border import BorderFinder
from fxtune.data.chat.calls import calling, renamed, with_call_style
from fxtune.data.chat.rewriting import PLAIN_TOOL
from fxtune.data.chat.special_tokens import AliasedText
from fxtune.data.chat.template import unused_characters
from fxtune.data.chat.template_source import ChatTemplates
from fxtune.data.config import DataConfig
from fxtune.data.formats.values import RowError
from fxtune.errors import ConfigError, first_line
from fxtune.plugins import ENVIRONMENTS, tools_of

ToolCall: TypeAlias = tuple[str, dict[str, Any] | None]
"""The name of a tool, and its arguments. None: they are no JSON object."""
USER = {"role": "user", "content": "?"}


def schemas(environment: str) -> list[dict[str, Any]]:
    """The JSON schemas of an environment's tools. Raises ConfigError."""
    from transformers.utils import get_json_schema

    kind = ENVIRONMENTS[environment]
    if not (tools := tools_of(kind)) or not hasattr(kind, "reset"):
        raise ConfigError(f"The environment `{environment}` needs reset() and a method that the model may call.")
    try:
        return [get_json_schema(MethodType(tool, kind)) for tool in tools.values()]
    except ValueError as error:
        raise ConfigError(
            f"The environment `{environment}`: {first_line(error)} Give each tool type hints, and a docstring with "
            "its arguments."
        ) from error


class ToolTurns:
    """Reads calls in answers, and encodes results. Raises ConfigError for a chat template whose calls it cannot read,
    or that writes a turn otherwise once results follow."""

    def __init__(self, tokenizer: Any, data: DataConfig) -> None:
        templates = ChatTemplates(tokenizer, data.chat_template, data.chat_template_kwargs, data.template_time, None)
        self.tokenizer, (self.template, self.escaper, rewriting) = tokenizer, templates.get(with_tools=True)
        self.mark, _ = unused_characters(self.template.source)
        between, self.tail = self.template.around_arguments
        style, head = self.template.call_style, self._head()
        thought = calling("f", {"a": 1}) | {"reasoning_content": "r"}
        chat = with_call_style([USER, thought, {"role": "tool", "content": "r"}], style)
        if not style.is_written or style.short_ids or not (head and between):
            problem = "its calls have no form that fxtune reads"
        elif self.mark not in self.template.render([USER], [renamed(PLAIN_TOOL, self.mark)])[0]:
            problem = "it does not write the tools that the model may call"
        elif rewriting.turns(chat, [False, True, False]):
            problem = "it writes a turn otherwise once results of tools follow"
        else:
            self._call = re.compile(rf"{_loosely(head)}([\w.:-]+?){_loosely(between)}")
            self.end: int = tokenizer(self.tail, add_special_tokens=False)["input_ids"][-1]
            """The token that ends a turn with calls."""
            return
        raise ConfigError(f"data.chat_template: {problem}. Name a template that calls of tools can be read from.")

    def _head(self) -> str:
        """The text before a tool's name that is the same for a first and a second call."""
        heads = list[str]()
        for names in ([self.mark], ["f", self.mark]):
            turn = calling("f", {})
            turn["tool_calls"] = [renamed(turn["tool_calls"][0], name) for name in names]
            with suppress(RowError):  # some templates write one call only
                text, _ = self.template.render(with_call_style([USER, turn], self.template.call_style))
                prompt, _ = self.template.render([USER], prompt=True)
                heads.append(text.partition(self.mark)[0].removeprefix(prompt)[::-1])
        return os.path.commonprefix(heads)[::-1].strip()  # noqa: RUF071 - of characters

    def read(self, ids: Sequence[int]) -> tuple[dict[str, Any], list[ToolCall]]:
        """The message of a turn, and its calls."""
        whole, shown = (
            self.tokenizer.decode(ids, skip_special_tokens=skips, clean_up_tokenization_spaces=False)
            for skips in (False, True)
        )
        text = whole.rpartition("</think>")[2]
        calls = [(found[1], _object(text[found.end() :])) for found in self._call.finditer(text)]
        written = [{"type": "function", "function": {"name": name, "arguments": given}} for name, given in calls]
        return {"role": "assistant", "content": shown, **({"tool_calls": written} if calls else {})}, calls

    def encode(self, results: Sequence[tuple[str, str]]) -> list[int]:
        """The tokens between the end of a turn with calls and the next turn. `results`: (tool, text) of each call."""
        turns = [{"role": "tool", "name": name, "content": text} for name, text in results]
        chat = with_call_style([USER, calling(results[0][0], {"a": self.mark}), *turns], self.template.call_style)

        def write(change: Callable[[Any], Any]) -> str:
            return self.template.render(change(chat), prompt=True)[0]

        text = write(lambda messages: messages)
        begin = text.index(self.tail, text.index(self.mark)) + len(self.tail)
        try:
            is_quoted = self.escaper.is_quoted(turns, None)
            aliased = self.escaper.alias(text, write) if is_quoted else AliasedText(text, [], [0])
            backend, added = self.tokenizer.backend_tokenizer, self.tokenizer.added_tokens_decoder
            finder = self.escaper.finder(aliased.text) if is_quoted else BorderFinder(backend, added)
        except RowError as error:
            return self.encode([(name, str({"error": str(error)})) for name, _ in results])
        ((ids, offsets),) = finder.encode([aliased.text])
        first = aliased.position(begin)
        return [token for token, (start, _) in zip(ids, offsets, strict=True) if start >= first]


def _loosely(text: str) -> str:
    """A pattern for `text` with any spaces between its words."""
    return r"\s*".join(map(re.escape, text.split()))


def _object(text: str) -> dict[str, Any] | None:
    """The JSON object with which `text` begins."""
    with suppress(ValueError, RecursionError):
        found, _ = json.JSONDecoder().raw_decode(text.lstrip())
        return found if isinstance(found, dict) else None
    return None
