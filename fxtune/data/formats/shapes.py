"""Converts common shapes of rows that no format reads: chats of APIs, answers with scores, images with texts.

Each function returns a row that a format reads, or None if the row does not have this shape. It raises RowError if it
cannot convert a row of this shape. The APIs of Anthropic, Gemini and OpenAI (Responses) write a chat as parts or
items: texts, images, thoughts, tool calls and their results. Parts of other kinds stay as they are, and image_parts.py
names them in an error. Signatures and ids of items are not read.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from fxtune.data.formats.chat_format import LIST_KEYS, is_chat
from fxtune.data.formats.image_parts import COLUMNS, MARK, columns_of, is_image
from fxtune.data.formats.pair_format import CHOSEN, REJECTED, SCORES
from fxtune.data.formats.values import RowError, parse_json

FILE_NAME = "file_name"
"""The column in which ImageFolder of `datasets` has the name of an image file."""
OTHERS = "other answers"
"""This added column has all answers of a row if only some are used. A remark counts such rows (chat/encode.py)."""
ORDER = REASONING, CONTENT, CALLS = "reasoning_content", "content", "tool_calls"
"""The keys of a message, in the order in which chat templates write them."""


def from_api(row: Mapping[str, Any], fits: bool) -> dict[str, Any] | None:
    """Convert a chat of an API to a row with `messages`. `fits`: whether a format has the columns of this row. If so,
    the row is converted only if it has parts of Anthropic's API, because the format would refuse them."""
    lists = {name: _listed(row.get(name), name) for name in ("messages", "contents", "input", "output")}
    fits = fits or any(row.get(name) is not None for name in LIST_KEYS)
    parts = [part for turn in lists["messages"] if isinstance(turn.get(CONTENT), list) for part in turn[CONTENT]]
    has_blocks = isinstance(row.get("system"), list) and [turn.get("role") for turn in lists["messages"][:1]] == [
        "user"
    ]
    if has_blocks or any(_read(part)[0] != CONTENT for part in parts):
        columns = {"system": "system", "messages": "user"}
    elif not fits and is_chat(lists["contents"], "parts"):
        columns = {"systemInstruction": "system", "contents": "user"}
    elif not fits and any({"role", "type"} & item.keys() for item in lists["input"] + lists["output"]):
        columns = {"instructions": "system", "input": "user", "output": "assistant"}
    else:
        return None
    turns: list[Any] = []
    for name, role in columns.items():  # a column that is one text is a message of this role
        turns += lists.get(name) or [{"role": role, CONTENT: row.get(name)}] * bool(row.get(name))
    rest = {key: value for key, value in row.items() if key not in columns}
    return {**rest, "messages": _messages(turns), "tools": _schemas(row.get("tools"))}


def best_and_worst(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """Convert answers with scores to a pair: the best answer is chosen, the worst answer is rejected."""
    match row if row.keys().isdisjoint((CHOSEN, REJECTED)) else {}:
        case {"responses": [*answers], "scores": [*scores]} | {"completions": [*answers], "scores": [*scores]}:
            pass
        case {"completions": [{"response": _, "overall_score": _}, *_] as found}:  # UltraFeedback
            answers, scores = ([one.get(key) for one in found] for key in ("response", "overall_score"))
        case _:
            return None
    numbers = [score for score in scores if isinstance(score, (int, float))]
    if not len(numbers) == len(scores) == len(answers) or len(set(numbers)) < 2:
        raise RowError("each answer needs a score, and one answer a higher score than another, to make a pair")
    best, worst = max(numbers), min(numbers)
    rest = {key: value for key, value in row.items() if key not in ("responses", "completions", "scores")}
    rest |= dict(zip(SCORES[0], (best, worst), strict=True)) | ({OTHERS: answers} if len(answers) > 2 else {})
    return rest | {CHOSEN: answers[scores.index(best)], REJECTED: answers[scores.index(worst)]}


def with_mark(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """Convert an image with a question and its answers, or with a caption, to Alpaca's columns. A row with a pair of
    answers keeps its columns. The image is put before the question, unless a text already has its mark."""
    images = columns_of(row) or [FILE_NAME] * is_image(row.get(FILE_NAME))
    if len(images) != 1 or row.get("history") or not row.keys().isdisjoint(LIST_KEYS):
        return None
    image, text, is_pair = row[images[0]], row.get("text"), bool(row.get(CHOSEN) and row.get(REJECTED))
    asked = [name for name in ("instruction", "question", "prompt") if row.get(name) is not None]
    given = [name for name in ("output", "answer", "answers", "completion", "response") if row.get(name) is not None]
    if text is not None and not (asked or given or is_pair) and not (isinstance(image, str) and image in str(text)):
        given = ["text"] * is_image(image)  # a caption; a page of text would quote its image
    elif text is not None or len(asked) != 1 or not isinstance(row[asked[0]], str) or (is_pair and "prompt" in asked):
        return None
    values = [one for name in given for one in (row[name] if isinstance(row[name], list) else [row[name]])]
    answers = [one.get("answer") if isinstance(one, Mapping) and "rank" not in one else one for one in values]  # VQAv2
    if len(given) + is_pair != 1 or not (answers or is_pair) or not all(isinstance(one, str) for one in answers):
        return None
    question = row[asked[0]] if asked else ""
    if not any(MARK in str(row.get(name)) for name in (*asked, "input", "system")):
        question = MARK * (len(image) if isinstance(image, list) else 1) + question
    column = COLUMNS[1] if images == [FILE_NAME] else images[0]
    found = {key: value for key, value in row.items() if key not in (*given, FILE_NAME)} | {column: image}
    if is_pair:
        return found | {asked[0]: question}
    found = {key: value for key, value in found.items() if key not in asked} | {"instruction": question}
    found |= {OTHERS: answers} if len({*answers}) > 1 else {}
    return found | {"output": Counter(answers).most_common(1)[0][0]}


def _listed(value: Any, where: str) -> list[Any]:
    """The list `value`, also from a JSON string, if its entries are objects; otherwise an empty list."""
    found = value if is_chat(value) else []
    return parse_json(found, where) if isinstance(found, str) else found


def _messages(turns: list[Any]) -> list[Any]:
    """Convert turns and items to messages. Neighbouring items of the assistant become one message. Raises RowError."""
    messages: list[Any] = []
    message: dict[str, Any] = {}
    was_item = False
    for index, turn in enumerate(turns):
        is_item = not {"role", "parts"} & turn.keys()
        parts = [turn] if is_item else turn.get("parts", turn.get(CONTENT))
        parts = parts.get("parts") if isinstance(parts, Mapping) else parts
        role = "assistant" if is_item or turn.get("role") == "model" else turn.get("role", "user")
        message = message if (is_item or was_item) and message.get("role") == role else {}
        was_item = is_item
        if not parts:
            messages.append(turn)
            continue
        for part in parts if isinstance(parts, list) else [{"text": parts}]:
            key, value = _read(part)
            if key == "tool":
                messages, message = [*messages, value], {}
                continue
            if any(later in message for later in ORDER[ORDER.index(key) + 1 :]):
                if not is_item:
                    raise RowError(f"turn {index + 1} goes on after its text or its calls; make two turns of it")
                message = {}
            if not message:
                own = {"role", "parts", CONTENT, "type", "id", "status"} | (turn.keys() if is_item else set())
                message = {"role": role} | {name: value for name, value in turn.items() if name not in own}
                messages.append(message)
            before = message.get(key, "" if key == REASONING else [])
            message[key] = f"{before}\n\n{value}".lstrip() if key == REASONING else [*before, value]
    return messages


def _read(part: Any) -> tuple[str, Any]:
    """Convert a part or an item to (a key of the message, its value), or to ("tool", a message with a result)."""
    match part:
        case {"type": "thinking", "thinking": str(text)} | {"thought": True, "text": str(text)}:
            return REASONING, text
        case {"type": "reasoning", "content": [{"text": _}, *_] as texts} | {"summary": [{"text": _}, *_] as texts}:
            return REASONING, "\n\n".join(str(text["text"]) for text in texts)
        case {"type": "tool_use", "name": name, "id": id} | {"type": "function_call", "name": name, "call_id": id}:
            return CALLS, {"id": id, "function": {"name": name, "arguments": part.get("input", part.get("arguments"))}}
        case {"functionCall": {"name": name} as call}:
            return CALLS, {"id": call.get("id"), "function": {"name": name, "arguments": call.get("args")}}
        case {"type": "tool_result", "tool_use_id": id} | {"type": "function_call_output", "call_id": id}:
            found = part.get("output", part.get(CONTENT)) or ""
            found = [_read(one)[1] for one in found] if isinstance(found, list) else found
            return "tool", {"role": "tool", "tool_call_id": id, CONTENT: found}
        case {"functionResponse": {"name": name, "response": found}}:
            return "tool", {"role": "tool", "name": name, CONTENT: json.dumps(found, ensure_ascii=False)}
        case {"inlineData": {"mimeType": kind, "data": data}}:
            return CONTENT, {"type": "image", "image": f"data:{kind};base64,{data}"}
        case {"type": "input_image", "image_url": url}:
            return CONTENT, {"type": "image_url", "image_url": url}
        case {"text": str(text)} if part.get("type") in (None, "text", "input_text", "output_text"):
            return CONTENT, {"type": "text", "text": text}
    return CONTENT, part


def _schemas(tools: Any) -> Any:
    """Convert the schemas of tools to OpenAI's form. Other values stay as they are."""
    tools = parse_json(tools, "tools") if isinstance(tools, str) and tools.strip() else tools
    if not is_chat(tools):
        return tools
    names = {"input_schema": "parameters"} | {key: key for key in ("name", "description", "parameters", "strict")}
    return [
        {"type": "function", "function": {names[key]: value for key, value in tool.items() if key in names}}
        if "name" in tool and ("input_schema" in tool or tool.get("type", "function") == "function")
        else tool
        for group in tools
        for tool in group.get("functionDeclarations", [group])
    ]
