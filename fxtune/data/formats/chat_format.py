"""Converts the chats of all formats to the list of messages that chat templates expect.

The formats messages, ShareGPT, Alpaca and prompt/completion differ only in names. Each becomes a list of messages with
the keys that templates of `transformers` know (role, content, reasoning_content, tool_calls, tool_call_id, name) and
with `images` (image_parts.py). A row that cannot be read raises RowError, which names the wrong key.

This module also decides which turns are learned (`Conversation.supervised`). `data.learn` chooses turns; by default
all assistant turns, with their tool calls. Turns of a prompt are not learned, nor turns that the row switches off
(`weight: 0` or `train: false`). An assistant turn that the row switches on is always learned. A row with an empty
answer, or with a call that no program could run, is a bad row, because the model would learn to write it.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from fxtune.data.formats import image_parts
from fxtune.data.formats.image_parts import place_images, read_content
from fxtune.data.formats.row_format import BEGUN, OPEN, ChatRole, Content, Conversation, LearnConfig, RowFormat
from fxtune.data.formats.values import (
    RowError,
    parse_json,
    require_text,
    require_words,
    short,
    spelled,
    type_name,
    without_nulls,
)

ROLES = tuple(role.value for role in ChatRole)

# ShareGPT has no standard; public datasets use these names.
SHAREGPT_ROLES = {
    "system": "system",
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "model", "bot", "chatgpt", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "tool_response", "function", "function_response", "observation"), "tool"),
}

SYSTEM_ROLES = ("system", "developer")
"""Roles of a system prompt. `developer` is OpenAI's newer name. It becomes `system` for templates without it."""

LIST_KEYS = ("messages", "conversations", "conversation")
VARIABLES = "chat_template_kwargs"
"""A column with variables of the chat template for one row. `data.chat_template_kwargs` sets them for all rows."""
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
CHAT_COLUMNS = frozenset(
    (*LIST_KEYS, *image_parts.COLUMNS, "tools", "functions", "parallel_tool_calls", VARIABLES, "prompt", "text")
)
"""Columns that chats often have. `parallel_tool_calls` is an option of OpenAI's service. `prompt` and `text` repeat
the first question or the rendered text."""


class ChatFormat(RowFormat):
    is_chat = True
    has_lists: ClassVar[bool] = False
    """Whether lists of messages may be JSON strings, as in CSV files."""

    def __init__(self, needs_answer: bool = True) -> None:
        """`needs_answer`: whether a chat without an assistant turn is refused."""
        self.needs_answer = needs_answer

    @abstractmethod
    def turns(self, row: Mapping[str, Any]) -> Conversation:
        """The messages of a row, with their places and train flags. Raises RowError."""

    def read(self, row: Mapping[str, Any], learn: LearnConfig, unused: Collection[str] = ()) -> Content:
        row = with_parsed_lists(row) if self.has_lists else row
        used = row if row.keys().isdisjoint(unused) else {key: row[key] for key in row if key not in unused}
        chat = self.turns(used)
        chat.row = row
        if self.needs_answer or _has_answer(chat):
            complete(chat, used, learn)
        else:
            complete_prompt(chat, used)
        return chat


def _has_answer(chat: Conversation) -> bool:
    return any(message["role"] == "assistant" for message in chat.messages)


def complete(chat: Conversation, row: Mapping[str, Any], learn: LearnConfig) -> None:
    """Give a chat the images, tools and variables of its row, and decide which turns are learned. Raises RowError."""
    complete_prompt(chat, row)
    if not _has_answer(chat):
        raise RowError("no assistant turn")
    chat.supervised = _supervised(chat, learn)
    for message, place, learned in zip(chat.messages, chat.places, chat.supervised, strict=True):
        if learned and "tool_calls" not in message:  # reasoning alone is no answer
            require_answer(message["content"][len(message.get(BEGUN, "")) :].rpartition("</think>")[2], place)


def complete_prompt(chat: Conversation, row: Mapping[str, Any]) -> None:
    """Give a chat the images, tools and variables of its row. No turn is learned. Raises RowError."""
    place_images(chat, row)
    functions = [{"type": "function", "function": entry} for entry in _tools(row.get("functions"), "functions") or ()]
    chat.tools = _tools(row.get("tools"), "tools") or functions or None  # `functions` is OpenAI's older `tools`
    schemas = [tool.get("function", tool) for tool in chat.tools or ()]
    known = {schema.get("name"): schema.get("parameters") for schema in schemas if isinstance(schema, Mapping)}
    for call in (call for message in chat.messages for call in message.get("tool_calls", ())):
        function, parameters = call["function"], known.get(call["function"]["name"])
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        if isinstance(properties, Mapping):
            # Arrow gives each call the keys of all calls. A null argument that the schema has is a value and stays.
            given = function["arguments"].items()
            kept = {key: value for key, value in given if value is not None or key in properties}
            call["function"] = {**function, "arguments": kept}
    chat.variables = _variables(row.get(VARIABLES))
    chat.supervised = [False] * len(chat.messages)


def require_answer(text: str, place: str) -> None:
    """Raise RowError if a text that is learned is empty."""
    if not text.strip():
        raise RowError(f"{place} is empty, so the model would learn to answer nothing")


def _supervised(chat: Conversation, learn: LearnConfig) -> list[bool]:
    chosen = [
        train_flag is not False
        and ("system" if message["role"] in SYSTEM_ROLES else message["role"]) in learn.roles
        and (learn.tool_calls or "tool_calls" not in message)
        for message, train_flag in zip(chat.messages, chat.train_flags, strict=True)
    ]
    if (learn.last_turn_only or learn.since_last_question) and True in chosen:
        first = last = len(chosen) - 1 - chosen[::-1].index(True)
        if not learn.last_turn_only:
            questions = [index for index in range(last) if chat.messages[index]["role"] == "user"]
            first = max(questions, default=-1) + 1
        chosen = [learned and first <= index <= last for index, learned in enumerate(chosen)]
    return [
        learned or (train_flag is True and message["role"] == "assistant")
        for learned, message, train_flag in zip(chosen, chat.messages, chat.train_flags, strict=True)
    ]


def with_parsed_lists(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Parse lists of messages in `row` that are JSON strings, as in CSV files. Returns a row. Raises RowError."""
    texts = {key: row[key] for key in LIST_KEYS if isinstance(row.get(key), str) and row[key].strip()}
    return {**row, **{key: parse_json(text, key) for key, text in texts.items()}} if texts else row


def add_turns(chat: Conversation, turns: Any, key: str) -> None:
    """Add the messages of `turns`, the list in column `key`. Raises RowError."""
    if not isinstance(turns, (list, tuple)):
        raise RowError(f"{key} is {type_name(turns)}, not a list of messages")
    if not turns:
        raise RowError(f"{key} is empty")
    for index, turn in enumerate(turns):
        add_turn(chat, turn, f"{key}[{index}]")


def add_answer(chat: Conversation, answer: Any, column: str) -> None:
    """Add an answer to a prompt: a text, a turn or a list of turns. Raises RowError."""
    # The messages so far are a prompt: they are not learned, and an answer continues a begun assistant turn.
    chat.train_flags, chat.ends_prompt = [False] * len(chat.messages), True
    if isinstance(answer, str):
        chat.add({"role": "assistant", "content": require_text(answer, column)}, column)
    elif isinstance(answer, Mapping):
        add_turn(chat, answer, column)
    elif isinstance(answer, (list, tuple)):
        add_turns(chat, answer, column)
    else:
        raise RowError(f"{column} is {type_name(answer)}, not a text, a turn or a list of turns")


def add_prompt(chat: Conversation, prompt: Any) -> None:
    """Add a prompt: the text of a question, or a list of messages. Raises RowError."""
    if isinstance(prompt, str):
        chat.add({"role": "user", "content": require_words(prompt, "prompt")}, "prompt")
    elif isinstance(prompt, (list, tuple)):
        add_turns(chat, prompt, "prompt")
    else:
        raise RowError(f"prompt is {type_name(prompt)}, not a text or a list of messages")


def add_turn(chat: Conversation, turn: Any, where: str) -> None:
    """Add the message `turn`, which the row has at `where`. Raises RowError."""
    if not isinstance(turn, Mapping):
        raise RowError(f"{where} is {type_name(turn)}, not an object")
    role, content_key = _role(turn, where)
    message: dict[str, Any] = {"role": role}
    calls = _tool_calls(turn, where) if role == "assistant" else None
    train_flag = _train_flag(turn, where)

    content = turn.get(content_key)
    if turn.get("from") == "function_call":
        calls, content = _calls_in_text(content, f"{where}.{content_key}"), None
    if content is not None or not calls:
        message["content"], images = read_content(content, f"{where}.{content_key}")
        if images:
            message["images"] = images
    if calls:
        message["tool_calls"] = calls
    for name in ("tool_call_id", "name"):
        if turn.get(name) is not None:
            message[name] = require_text(turn[name], f"{where}.{name}")
    if role == "tool" and (wanted := message.get("tool_call_id")):
        ids = [call.get("id") for earlier in chat.messages for call in earlier.get("tool_calls", ())]
        if wanted not in ids:
            known = f"the calls before it have {', '.join(map(short, ids))}" if ids else "no turn before it has a call"
            raise RowError(f"{where}.tool_call_id is {short(wanted)}, and {known}")
    if role == "assistant" and (name := next((key for key in REASONING_KEYS if turn.get(key) is not None), "")):
        # The message has its reasoning under two names, because gpt-oss's template reads `thinking`. Newer releases of
        # transformers do the same.
        message["reasoning_content"] = message["thinking"] = require_text(turn[name], f"{where}.{name}")
    if (begun := turn.get("prefix")) is not None and (not isinstance(begun, bool) or role != "assistant"):
        raise RowError(
            f"{where}.prefix is {short(begun)}; use true, where the next assistant's turn goes on with this one"
        )
    chat.add(message, f"{where}.{content_key}", train_flag)
    if begun:
        message[OPEN] = True


def _role(turn: Mapping[str, Any], where: str) -> tuple[str, str]:
    """Returns (the role, the key of the content). Raises RowError."""
    if "role" in turn or "from" not in turn:
        role = turn.get("role")
        if not isinstance(role, str):
            raise RowError(f"{where}.role is {'missing' if 'role' not in turn else type_name(role)}")
        role = "tool" if role == "function" else role  # OpenAI's older name
        if role not in (*ROLES, *SYSTEM_ROLES):
            raise RowError(f"{where}: role {spelled(role)} is unknown; use system, user, assistant or tool")
        return role, "content" if "content" in turn or "value" not in turn else "value"
    role = turn["from"]
    if not isinstance(role, str) or role not in SHAREGPT_ROLES:
        named = spelled(role) if isinstance(role, str) else type_name(role)
        raise RowError(f"{where}: from {named} is unknown; use one of {', '.join(SHAREGPT_ROLES)}")
    return SHAREGPT_ROLES[role], "value" if "value" in turn or "content" not in turn else "content"


def _train_flag(turn: Mapping[str, Any], where: str) -> bool | None:
    """Whether the turn's `train` or `weight` says that the turn is learned; None if neither is set."""
    weight, train = turn.get("weight"), turn.get("train")
    if weight is not None and weight not in (0, 1):
        raise RowError(
            f"{where}.weight is {short(weight)}, and a turn is learned whole or not at all: use 0 (context only) or 1 "
            "(learn this turn). To learn a row less than others, move it to a source with a smaller `weight`"
        )
    if train is not None and not isinstance(train, bool):
        raise RowError(f"{where}.train is {type_name(train)}; use true or false")
    if weight is None and train is None:
        return None
    return weight != 0 and train is not False


def _tool_calls(turn: Mapping[str, Any], where: str) -> list[dict[str, Any]] | None:
    calls = turn.get("tool_calls")
    if isinstance(calls, str) and calls.strip():
        calls = parse_json(calls, f"{where}.tool_calls")
    if not calls and isinstance(turn.get("function_call"), Mapping):  # OpenAI's older form of a single call
        calls = [{"type": "function", "function": turn["function_call"]}]
    if not calls:
        return None
    if not isinstance(calls, (list, tuple)):
        raise RowError(f"{where}.tool_calls is {type_name(calls)}, not a list")
    parsed: list[dict[str, Any]] = []
    for index, call in enumerate(calls):
        if not isinstance(call, Mapping):
            raise RowError(f"{where}.tool_calls[{index}] is {type_name(call)}, not an object")
        if not isinstance(call.get("function"), Mapping):  # the call has no key `function`
            call = {"function": {key: value for key, value in call.items() if key not in ("id", "type")}} | (
                {"id": call["id"]} if "id" in call else {}
            )
        if not isinstance(call["function"].get("name"), str):
            raise RowError(f"{where}.tool_calls[{index}] has no function name")
        function = _with_parsed_arguments(call["function"], f"{where}.tool_calls[{index}]")
        if call.get("id") is not None and call["id"] in [other.get("id") for other in parsed]:
            raise RowError(
                f"{where}.tool_calls[{index}].id is {short(call['id'])}, as another call of this turn has: it is "
                "not certain which result belongs to which call; give each its own"
            )
        parsed.append({"type": "function", **call, "function": function})
    return parsed


def _with_parsed_arguments(function: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A copy of `function` whose arguments are an object. Chat templates would quote a JSON string a second time."""
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = parse_json(arguments, f"{where}.arguments") if arguments.strip() else {}
    elif arguments is None:
        if others := [key for key in function if key not in ("name", "arguments")]:
            raise RowError(f"{where} has no arguments, but {', '.join(map(short, others))}")
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise RowError(f"{where}.arguments is {type_name(arguments)}, not an object")
    return {**function, "arguments": dict(arguments)}


def _calls_in_text(text: Any, where: str) -> list[dict[str, Any]]:
    """The calls in the text of a ShareGPT turn: a JSON object, or a list of objects."""
    value = parse_json(text, where) if isinstance(text, str) else text
    calls = value if isinstance(value, list) else [value]
    if not calls or not all(isinstance(call, Mapping) for call in calls):
        raise RowError(f"{where} is no call: an object with `name` and `arguments`, or a list of them")
    return _tool_calls({"tool_calls": calls}, where) or []


def _tools(tools: Any, column: str) -> list[dict[str, Any]] | None:
    """The schemas of tools; None without tools. Nulls are removed, because Arrow writes null for missing keys. A null
    in a JSON string is a value and stays."""
    if from_text := isinstance(tools, str):
        tools = parse_json(tools, column) if tools.strip() else None
    if tools is None or tools == []:
        return None
    if not isinstance(tools, (list, tuple)):
        raise RowError(f"{column} is {type_name(tools)}, not a list of JSON schemas")
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise RowError(f"{column}[{index}] is {type_name(tool)}, not a JSON schema")
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and not isinstance(name := function.get("name", ""), (str, type(None))):
            raise RowError(f"{column}[{index}]: the tool's name is {type_name(name)}, not a string")
    return [dict(tool) for tool in tools] if from_text else without_nulls(tools)


def _variables(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        value = parse_json(value, VARIABLES) if value.strip() else None
    if value is not None and not isinstance(value, Mapping):
        raise RowError(f"{VARIABLES} is {type_name(value)}, not an object of variables")
    return {name: item for name, item in (value or {}).items() if item is not None}  # Parquet fills gaps with null


def is_chat(value: Any, *keys: str) -> bool:
    """Whether `value` is a non-empty list of objects that have all `keys`, or such a list as a JSON string."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return False
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(turn, dict) and all(key in turn for key in keys) for turn in value)
