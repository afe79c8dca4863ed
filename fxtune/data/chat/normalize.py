"""From a chat row as people store it to a conversation as chat templates take it.

messages, ShareGPT, Alpaca and prompt/completion differ in names only, so all four become one list of messages with the
keys that templates of `transformers` know: role, content, reasoning_content, tool_calls, tool_call_id, name. A row that
cannot be read is a `BadRow` whose message says which key is wrong and how, never a traceback: rows come from strangers.

What the model may learn from is settled here as well (`Conversation.learn`): the assistant's turns, except those that
hold tool calls, those that the row switches off (`weight: 0` or `train: false`), and those that are part of a prompt.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fxtune.data.read.formats import RowFormat
from fxtune.data.read.jsonl import NESTED, too_deep
from fxtune.errors import DataError

ROLES = ("system", "user", "assistant", "tool")

# ShareGPT never had a standard; these are the names that public datasets use.
SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "tool_response": "tool",
    "function": "tool",
    "function_response": "tool",
    "observation": "tool",
}

SURROGATE = re.compile("[\ud800-\udfff]")
_LIST_KEYS = ("messages", "conversations", "conversation")
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


class BadRow(DataError):
    """One row cannot be used. The message is the reason alone; whoever reads the source adds the file and the line."""


@dataclass
class Conversation:
    messages: list[dict[str, Any]] = field(default_factory=list)
    learn: list[bool] = field(default_factory=list)
    """One a message: whether it is an assistant's turn that the model is trained to write."""
    tools: list[dict[str, Any]] | None = None
    """The tools offered, as JSON schemas, or None."""

    def add(self, message: dict[str, Any], learn: bool) -> None:
        self.messages.append(message)
        self.learn.append(learn)


def conversation(row: Mapping[str, Any], format: RowFormat) -> Conversation:
    """Read a chat row.

    Args:
        row: the row, its columns already renamed to ours.
        format: messages, sharegpt, alpaca, or prompt_completion whose two sides are lists of messages.

    Raises:
        BadRow: the row has a missing, unknown or wrongly typed part, or no assistant turn.
    """
    if not isinstance(row, Mapping):
        raise BadRow(f"the row is {kind(row)}, not an object")
    if format is RowFormat.alpaca:
        chat = _alpaca(row)
    elif format is RowFormat.prompt_completion:
        chat = _prompt_completion(row)
    elif format in (RowFormat.messages, RowFormat.sharegpt):
        chat = _turns(row)
    else:
        raise AssertionError(f"{format} rows hold no conversation")
    chat.tools = _tools(row.get("tools"))
    if not any(message["role"] == "assistant" for message in chat.messages):
        raise BadRow("no assistant turn")
    return chat


def kind(value: Any) -> str:
    """What a JSON value is, in a user's words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, (int, float)):
        return "a number"
    if isinstance(value, str):
        return "a string"
    if isinstance(value, Mapping):
        return "an object"
    return "a list" if isinstance(value, (list, tuple)) else f"of type {type(value).__name__}"


def short(value: Any) -> str:
    """A value of a row for a message, which a row cannot make long."""
    return reprlib.repr(value)


def require_text(value: Any, where: str) -> str:
    """`value`, which must be a string that UTF-8 can carry. Raises BadRow that names `where`."""
    if not isinstance(value, str):
        raise BadRow(f"{where} is {kind(value)}" + ("" if value is None else ", not a string"))
    if not value.isascii() and (lone := SURROGATE.search(value)):
        code = ord(lone.group())
        raise BadRow(f"{where} holds the lone surrogate \\u{code:04x} at character {lone.start()}: not valid Unicode")
    return value


def _turns(row: Mapping[str, Any]) -> Conversation:
    key = next((name for name in _LIST_KEYS if row.get(name) is not None), None)
    if key is None:
        raise BadRow("no list of messages: expected the key 'messages' or 'conversations'")
    chat = Conversation()
    _append(chat, row[key], key)
    system = row.get("system")
    if system is not None and chat.messages[0]["role"] != "system" and require_text(system, "system"):
        chat.messages.insert(0, {"role": "system", "content": system})
        chat.learn.insert(0, False)
    return chat


def _alpaca(row: Mapping[str, Any]) -> Conversation:
    chat = Conversation()
    if row.get("system") is not None and require_text(row["system"], "system"):
        chat.add({"role": "system", "content": row["system"]}, False)
    instruction = require_text(row.get("instruction"), "instruction")
    extra = require_text("" if row.get("input") is None else row["input"], "input")
    question = "\n\n".join(part for part in (instruction, extra) if part)
    if not question.strip():
        raise BadRow("instruction is empty")
    chat.add({"role": "user", "content": question}, False)
    chat.add({"role": "assistant", "content": require_text(row.get("output"), "output")}, True)
    return chat


def _prompt_completion(row: Mapping[str, Any]) -> Conversation:
    """Message lists on both sides: every turn of the prompt is context, also the assistant's."""
    chat = Conversation()
    _append(chat, row.get("prompt"), "prompt")
    chat.learn = [False] * len(chat.messages)
    start = len(chat.messages)
    _append(chat, row.get("completion"), "completion")
    if not any(message["role"] == "assistant" for message in chat.messages[start:]):
        raise BadRow("no assistant turn in completion")
    return chat


def _append(chat: Conversation, turns: Any, key: str) -> None:
    if not isinstance(turns, (list, tuple)):
        raise BadRow(f"{key} is {kind(turns)}, not a list of messages")
    if not turns:
        raise BadRow(f"{key} is empty")
    for index, turn in enumerate(turns):
        _append_turn(chat, turn, f"{key}[{index}]")


def _append_turn(chat: Conversation, turn: Any, where: str) -> None:
    if not isinstance(turn, Mapping):
        raise BadRow(f"{where} is {kind(turn)}, not an object")
    role, content_key = _role(turn, where)
    message: dict[str, Any] = {"role": role}
    calls = _tool_calls(turn, where) if role == "assistant" else None
    learn = _switched_on(turn, where) and role == "assistant" and not calls

    content = turn.get(content_key)
    if turn.get("from") == "function_call":
        # A call written as text in the place of an answer. An unreadable one stays text, but is not learned either.
        learn = False
        if (call := _parsed(content)) is not None:
            calls, content = [{"type": "function", "function": call}], None
    if content is not None or not calls:
        message["content"] = _content(content, f"{where}.{content_key}")
    if calls:
        message["tool_calls"] = calls
    for name in ("tool_call_id", "name"):
        if turn.get(name) is not None:
            message[name] = require_text(turn[name], f"{where}.{name}")
    if role == "assistant" and (name := next((key for key in _REASONING_KEYS if turn.get(key) is not None), "")):
        # Two names, because gpt-oss reads the second; newer releases of transformers do the same.
        message["reasoning_content"] = message["thinking"] = require_text(turn[name], f"{where}.{name}")
    chat.add(message, learn)


def _role(turn: Mapping[str, Any], where: str) -> tuple[str, str]:
    """The role, and the key under which the content stands."""
    if "role" in turn or "from" not in turn:
        role = turn.get("role")
        if not isinstance(role, str):
            raise BadRow(f"{where}.role is {'missing' if 'role' not in turn else kind(role)}")
        if role not in ROLES:
            raise BadRow(f"{where}: role {short(role)} is unknown; use system, user, assistant or tool")
        return role, "content" if "content" in turn or "value" not in turn else "value"
    role = turn["from"]
    if not isinstance(role, str) or role not in SHAREGPT_ROLES:
        named = short(role) if isinstance(role, str) else kind(role)
        raise BadRow(f"{where}: from {named} is unknown; use one of {', '.join(SHAREGPT_ROLES)}")
    return SHAREGPT_ROLES[role], "value" if "value" in turn or "content" not in turn else "content"


def _switched_on(turn: Mapping[str, Any], where: str) -> bool:
    weight, train = turn.get("weight"), turn.get("train")
    if weight is not None and weight not in (0, 1):
        raise BadRow(f"{where}.weight is {short(weight)}; use 0 (context only) or 1 (learn this turn)")
    if train is not None and not isinstance(train, bool):
        raise BadRow(f"{where}.train is {kind(train)}; use true or false")
    return weight != 0 and train is not False


def _content(content: Any, where: str) -> str:
    """A string, or the concatenation of a list of text parts."""
    if not isinstance(content, (list, tuple)):
        return require_text(content, where)
    texts = []
    for index, part in enumerate(content):
        if isinstance(part, str):
            texts.append(require_text(part, f"{where}[{index}]"))
            continue
        if not isinstance(part, Mapping) or part.get("type") != "text":
            named = f"of type {short(part.get('type'))}" if isinstance(part, Mapping) else kind(part)
            raise BadRow(f"{where}[{index}] is {named}; only text parts can be used")
        texts.append(require_text(part.get("text"), f"{where}[{index}].text"))
    return "".join(texts)


def _tool_calls(turn: Mapping[str, Any], where: str) -> list[dict[str, Any]] | None:
    calls = turn.get("tool_calls")
    if isinstance(calls, str) and calls.strip():
        calls = _json(calls, f"{where}.tool_calls")
    if not calls and isinstance(turn.get("function_call"), Mapping):  # OpenAI's first form of a single call
        calls = [{"type": "function", "function": turn["function_call"]}]
    if not calls:
        return None
    if not isinstance(calls, (list, tuple)):
        raise BadRow(f"{where}.tool_calls is {kind(calls)}, not a list")
    cleaned = []
    for index, call in enumerate(calls):
        if not isinstance(call, Mapping):
            raise BadRow(f"{where}.tool_calls[{index}] is {kind(call)}, not an object")
        call = _with_parsed_arguments(call)
        if isinstance(call.get("function"), Mapping):
            call["function"] = _with_parsed_arguments(call["function"])
        cleaned.append(call)
    return cleaned


def _with_parsed_arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    # APIs give arguments as a string of JSON; chat templates expect the object and would quote the string once more.
    function = dict(function)
    if (arguments := _parsed(function.get("arguments"))) is not None:
        function["arguments"] = arguments
    return function


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    if isinstance(tools, str):
        tools = _json(tools, "tools") if tools.strip() else None
    if tools is None or tools == []:
        return None
    if not isinstance(tools, (list, tuple)):
        raise BadRow(f"tools is {kind(tools)}, not a list of JSON schemas")
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise BadRow(f"tools[{index}] is {kind(tool)}, not a JSON schema")
    return [dict(tool) for tool in tools]


def _json(text: str, where: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRow(f"{where} is not valid JSON: {error}") from None
    if too_deep(text, value):
        raise BadRow(f"{where}: {NESTED}")
    return value


def _parsed(text: Any) -> dict[str, Any] | None:
    """The object that a string of JSON spells, or None."""
    if not isinstance(text, str):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and not too_deep(text, value) else None
