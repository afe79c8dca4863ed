"""Checks that each part of a row reaches the text, so that no words of a user are lost silently.

Every field of a row that is not empty must be in the rendered text, or be named: in KNOWN, the table of fields without
training text, or in the source's `unused`. Otherwise the row is a bad row, and its message names the field. If the
chat template leaves a part out by design, the document is used and counted under a remark.

There are two checks. The parts that a template writes depend on the shape of a conversation (its roles and fields). So
each new shape is rendered once with sentinels in all fields. This finds a system prompt that is dropped, even if other
messages have the same words. The other check searches the strings of each row in its text, which costs little.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from fxtune.data.chat.remarks import CONTENT_REMARK, REASONING_REMARK
from fxtune.data.chat.template import ChatTemplate, Messages, Tools, unused_characters
from fxtune.data.formats.chat_format import LIST_KEYS, REASONING_KEYS, SYSTEM_ROLES, is_chat
from fxtune.data.formats.image_parts import COLUMNS, IMAGE, columns_of, unread_image
from fxtune.data.formats.registry import preference_columns
from fxtune.data.formats.row_format import Conversation, RowFormat
from fxtune.data.formats.shapes import OTHERS
from fxtune.data.formats.values import RowError, short
from fxtune.errors import shortened

KNOWN = frozenset(
    """
    __index_level_0__ annotations annotator annotator_id audio author authors avatar categories category char_count
    chat_id config conversation_id country created created_at creator data_id data_source dataset dataset_name
    dataset_source date detoxify_moderation difficulty doc_id domain domains ds_name dump engine example_id extra
    extra_info file file_name file_path filename finish_reason generator guid hash hashed_ip header id ids idx index
    info instance_id key kind label_names lang language language_score languages len length lengths level licence
    license link links locale message_id meta metadata model model_name models moderation n_tokens n_turns name_id
    num_messages num_tokens num_turns openai_moderation origin origin_dataset origin_split parent_id path perplexity
    problem_id prompt_id quality quality_score question_id rank rating ratings redacted refusal repo repo_name reward
    role_id row_id sample_id score scores session_id sha size source sources split src subdomain subject subjects
    subset tag tags task task_id task_name task_type teacher thread_id time timestamp token_count token_counts
    tokens_count topic topics toxic toxicity turn_count turn_id turns type updated_at url usage user_id uuid version
    word_count year
    """.split()  # noqa: SIM905 - a table to read
)
"""Columns and fields of turns that describe a row and hold no training text."""
KNOWN_ENDINGS = tuple(
    f"_{ending}" for ending in ("id", "ids", "url", "date", "time", "count", "score", "hash", "type")
)
"""Names with these endings describe a row, too."""

SHOWN = 20
"""A message names at most this many columns."""

TURN_KEYS = frozenset(
    (*REASONING_KEYS, "role", "from", "content", "value", "tool_calls", "function_call", "tool_call_id")
) | {"weight", "train", "name", "prefix"}


class Coverage:
    """Checks the rows of a source. `unused`: names of fields that are left out on purpose. `enabled`: False checks
    nothing. `reads_images`: the model reads images, so a row must not lose an image."""

    def __init__(
        self, format: RowFormat, unused: Collection[str] = (), enabled: bool = True, reads_images: bool = False
    ) -> None:
        self.enabled, self.reads_images = enabled, reads_images
        self.unused = frozenset(unused)
        self._read = format.known_columns | self.unused
        self._columns = KNOWN | format.known_columns | self.unused | {OTHERS}
        self._names_answers = bool(format.answers)
        self._turn_keys = KNOWN | TURN_KEYS | self.unused
        self._unknown: dict[tuple[Any, ...], list[str]] = {}
        self._shapes: dict[Any, frozenset[tuple[int, str]]] = {}

    def check_images(self, row: Mapping[str, Any], questions: Iterable[str] = ()) -> None:
        """Raise RowError if a row without images should have one. `questions`: texts that may have marks of images."""
        if self.enabled and self.reads_images:
            questions = questions if self.unused.isdisjoint(COLUMNS) else ()
            if reason := unread_image(row, self._read, questions):
                raise RowError(reason)

    def check_columns(self, row: Mapping[str, Any], text: str) -> None:
        """Raise RowError if a column is neither known nor in the text."""
        unknown = self._unknown_keys(row, self._columns) if self.enabled else []
        if columns_of(row):  # image_path then tells where the image came from
            unknown = [column for column in unknown if column != "image_path"]
        if lost := [shortened(column) for column in unknown if _is_unread(row[column], text)]:
            preferences = None if self._names_answers else preference_columns(row, self.unused)
            columns = f"column{'s' * (len(lost) > 1)} {', '.join(map(repr, lost[:SHOWN]))}"
            fault = f"{columns} {'is' if len(lost) == 1 else 'are'} not read"
            if any(isinstance(row[column], list) and _is_of_numbers(row[column]) for column in unknown):
                fault += " (`train: false` in a message says that it is not learned)"
            if {"label", "labels"}.issuperset(lost):
                fault += f" (the value is {short(row[lost[0]])}; objective=classification learns it, and "
                fault += "objective=kto learns from true or 1 for a good answer, false or 0 for a bad answer)"
            raise RowError(preferences or self._message(fault, ", ".join(lost[:SHOWN])))

    def check_conversation(
        self, row: Mapping[str, Any], chat: Conversation, messages: Messages, text: str, template: ChatTemplate
    ) -> list[str]:
        """Remarks about parts that the template leaves out by design. Raises RowError if another part is left out.
        `messages`: the messages of `chat` in the form that the template takes."""
        if not self.enabled:
            return []
        remarks = dict.fromkeys(self._check_messages(messages, chat.tools, text, template))
        self.check_columns(row, text)
        for key in ("prompt", "text"):
            if self._is_beside(key, chat) and _is_no_repetition(key, row.get(key), chat, text):
                raise RowError(
                    self._message(f"column {key!r} is not read beside the chat, and does not repeat it", key)
                )
        for key in [key for key in LIST_KEYS if row.get(key)][1:]:  # only the first of these columns is read
            if key not in self.unused and _is_lost(row[key], text):
                raise RowError(self._message(f"column {key!r} is not read, as the row has another", key))
        for key in (*LIST_KEYS, "prompt", "completion", "chosen", "rejected", "rejected_messages"):
            turns = row.get(key)
            for index, turn in enumerate(turns if isinstance(turns, (list, tuple)) else (turns,)):
                for name in self._unknown_keys(turn, self._turn_keys) if isinstance(turn, Mapping) else ():
                    if _is_unread(turn[name], text):
                        raise RowError(self._message(f"{key}[{index}].{shortened(name)} is not read", shortened(name)))
        return list(remarks)

    def _is_beside(self, column: str, chat: Conversation) -> bool:
        """Whether a column is beside the chat: no message comes from it, and it is not left out on purpose."""
        if column in self.unused or chat.places[0].startswith(("chosen", "rejected")):
            return False
        return not (column == "text" and self._names_answers) and not any(
            place == column or place.startswith(f"{column}[") for place in chat.places
        )

    def _unknown_keys(self, value: Mapping[str, Any], known: frozenset[str]) -> list[str]:
        keys = (known is self._columns, *value)
        if keys not in self._unknown:
            if len(self._unknown) > 10_000:
                self._unknown.clear()
            self._unknown[keys] = [
                key for key in value if key not in known and not (isinstance(key, str) and self._describes(key))
            ]
        return self._unknown[keys]

    def _describes(self, key: str) -> bool:
        """Whether the name of a field says that the field describes a row, or an answer of a row of preferences."""
        if key.endswith(KNOWN_ENDINGS):
            return True
        words = key.lower().replace("-", "_").split("_") if self._names_answers else []
        rest = "_".join(word for word in words if word not in ("chosen", "rejected"))
        return rest != key and rest in KNOWN

    def _message(self, fault: str, name: str) -> str:
        return (
            f"{fault}, so a part of the row is not in the text that the model reads. Move this part to one that is "
            f"written; if it is not needed, set the source's `unused: [{name}]` ('data.sources.0.unused=[{name}]')"
        )

    def _check_messages(self, messages: Messages, tools: Tools, text: str, template: ChatTemplate) -> Iterator[str]:
        lost = self._lost_in_shape(messages, tools, template)
        position = 0
        for index, message in enumerate(messages):
            where = f"messages[{index}]"
            reasoning, content = reasoning_and_content(message)
            for part in content.split(IMAGE) if "content" not in self.unused else ():
                part = part.strip()
                at = text.find(part, position)
                position = at + len(part) if at >= 0 else position
                if part and ((index, "content") in lost or (at < 0 and _is_lost(part, text))):
                    if message.get("tool_calls"):
                        yield CONTENT_REMARK
                    elif message["role"] not in SYSTEM_ROLES or "system" not in self.unused:
                        name = "system" if message["role"] in SYSTEM_ROLES else "content"
                        raise RowError(
                            self._message(f"the chat template drops {where}, of role {message['role']}", name)
                        )
            if reasoning and self.unused.isdisjoint(REASONING_KEYS) and _is_lost(reasoning, text):
                if not self._keeps_reasoning(template, "reasoning_content" in message):
                    raise RowError(
                        self._message(f"the chat template drops the reasoning of {where}", "reasoning_content")
                    )
                yield REASONING_REMARK
            speaker = message.get("name", "") if message["role"] != "tool" and "name" not in self.unused else ""
            if speaker.strip() not in text:
                raise RowError(self._message(f"the chat template drops {where}.name", "name"))
            for number, call in enumerate(message.get("tool_calls", ())):
                arguments = call["function"].get("arguments")
                if (index, f"call {number}") in lost or _is_lost([call["function"]["name"], arguments], text):
                    raise RowError(
                        f"the chat template drops {where}.tool_calls[{number}] or its arguments; name one that writes "
                        "them in data.chat_template=FILE"
                    )
        if tools and "tools" not in self.unused:
            functions = [tool if not isinstance(tool.get("function"), Mapping) else tool["function"] for tool in tools]
            names = [function.get(key) for function in functions for key in ("name", "description")]
            if (-1, "tools") in lost or _is_lost(names, text):
                raise RowError(self._message("the chat template drops `tools`", "tools"))

    def _lost_in_shape(self, messages: Messages, tools: Tools, template: ChatTemplate) -> frozenset[tuple[int, str]]:
        """(index of a message, part) of all parts that the template does not write in conversations of this shape."""
        shape = (
            id(template),
            bool(tools),
            *(
                (turn["role"], bool(content), bool(reasoning), "thinking" in turn, len(turn.get("tool_calls", ())))
                for turn in messages
                for reasoning, content in [reasoning_and_content(turn)]
            ),
        )
        if shape not in self._shapes:
            if len(self._shapes) > 10_000:
                self._shapes.clear()
            self._shapes[shape] = _render_sentinels(messages, tools, template)
        return self._shapes[shape]

    def _keeps_reasoning(self, template: ChatTemplate, as_field: bool) -> bool:
        """Whether the template writes the reasoning of the last answer. `as_field`: it is a separate field, and not in
        the content."""
        shape = (id(template), as_field)
        if shape not in self._shapes:
            answer = {"role": "assistant", "content": "a"}
            reasoning = (
                {"reasoning_content": "r", "thinking": "r"} if as_field else {"content": "<think>\nr\n</think>\n\na"}
            )
            self._shapes[shape] = _render_sentinels(
                [{"role": "user", "content": "q"}, answer | reasoning], None, template
            )
        return (1, "reasoning") not in self._shapes[shape]


def _render_sentinels(messages: Messages, tools: Tools, template: ChatTemplate) -> frozenset[tuple[int, str]]:
    opening, closing = unused_characters(template.source)
    places: dict[tuple[int, str], str] = {}

    def sentinel(index: int, part: str) -> str:
        return places.setdefault((index, part), f"{opening}{len(places)}{closing}")

    probe = []
    for index, message in enumerate(messages):
        marked = dict(message)
        reasoning, content = reasoning_and_content(message)
        if content:
            marked["content"] = sentinel(index, "content") + IMAGE * content.count(IMAGE)
        if "reasoning_content" in message:
            marked["reasoning_content"] = marked["thinking"] = sentinel(index, "reasoning") if reasoning else ""
        elif reasoning:
            marked["content"] = (
                f"<think>\n{sentinel(index, 'reasoning')}\n</think>\n\n{marked['content'] if content else ''}"
            )
        if "tool_calls" in message:
            marked["tool_calls"] = [
                {**call, "function": {**call["function"], "name": sentinel(index, f"call {number}")}}
                for number, call in enumerate(message["tool_calls"])
            ]
        probe.append(marked)
    schemas = None
    if tools:
        parameters = {"type": "object", "properties": {"a": {"type": "string", "description": "a"}}, "required": ["a"]}
        function = {"name": sentinel(-1, "tools"), "description": "a", "parameters": parameters}
        schemas = [{"type": "function", "function": function}]
    try:
        text, _ = template.render(probe, schemas)
    except RowError:  # the template tests what a part holds; only the search for the row's strings is possible
        return frozenset()
    return frozenset(place for place, mark in places.items() if mark not in text)


def reasoning_and_content(message: Mapping[str, Any]) -> tuple[str, str]:
    """(reasoning, content) of a message, without outer whitespace. Reasoning is in its own field, or in the content
    before `</think>`."""
    content = message.get("content") or ""
    reasoning = message.get("reasoning_content") or ""
    if message["role"] == "assistant" and "</think>" in content:
        before, _, content = content.rpartition("</think>")
        reasoning = reasoning or before.partition("<think>")[2]
    return reasoning.strip(), content.strip()


def _is_no_repetition(column: str, value: Any, chat: Conversation, text: str) -> bool:
    """Whether the column `prompt` or `text` has words that the chat lacks. A part of the chat's text, or a list of its
    messages, has none. `text` has none either if it is the whole chat as another template writes it."""
    if isinstance(value, list) and is_chat(value):
        return any(_is_lost(turn.get("content", turn.get("value")), text) for turn in value)
    if column == "text" and isinstance(value, str) and _is_lost(value, text):
        at, said = 0, (turn.get("content") or "" for turn in chat.messages if turn["role"] not in SYSTEM_ROLES)
        for line in (line.strip() for part in said for line in part.replace(IMAGE, "\n").splitlines()):
            if (at := value.find(line, at)) < 0:
                return True
            at += len(line)
        return False
    return _is_unread(value, text)


def _is_unread(value: Any, text: str) -> bool:
    """_is_lost() for the value of a field with an unknown name. A list without text, such as a mask, is lost, too."""
    return _is_lost(value, text) or (isinstance(value, (list, tuple)) and _is_of_numbers(value))


def _is_of_numbers(value: Any) -> bool:
    """Whether a list, at any depth, holds numbers or booleans, and no text."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if not isinstance(value, (list, tuple)):
        return isinstance(value, (bool, int, float))
    return any(map(_is_of_numbers, value)) and not any(isinstance(item, str) for item in value)


def _is_lost(value: Any, text: str) -> bool:
    """Whether the text lacks a string of `value`, at any depth. The text may have the string escaped as in JSON. A
    number or a boolean by itself counts as lost."""
    if value is None:
        return False
    if isinstance(value, str):
        return not _is_written(value.strip(), text)
    if isinstance(value, Mapping):
        return any(_is_lost(item, text) for item in value.values() if not isinstance(item, (bool, int, float)))
    if isinstance(value, (list, tuple)):
        return any(_is_lost(item, text) for item in value if not isinstance(item, (bool, int, float)))
    return True


def _is_written(part: str, text: str) -> bool:
    if part in text:
        return True
    for ascii_only in (False, True):
        if json.dumps(part, ensure_ascii=ascii_only)[1:-1] in text:
            return True
    try:  # the part may be an object or a list, written as JSON
        value = json.loads(part) if part[:1] in ("{", "[") else None
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, (dict, list)):
        return not _is_lost(value, text)
    return "".join(part.split()) in "".join(text.split())  # a template may write whitespace differently
