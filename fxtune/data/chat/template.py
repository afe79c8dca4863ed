"""A chat template, and which characters of the rendered text the model learns.

A template turns messages into one text, and the loss mask needs the character span of every assistant turn in it.
Searching the text for the content does not work: templates trim it, remove the reasoning of earlier turns, and users
quote it. Two methods are exact:

(a) `{% generation %}` marks: the template marks the spans itself, and transformers returns them.

(b) Sentinels, for templates without marks (the published ones of Llama-3.1, Qwen3 and Gemma-3): render once more with
private-use characters in place of the assistant's contents. The template writes the text around them, and the rest of
the real text is the contents:

    all turns at once   If the pieces between the sentinels, joined with the contents as given (or stripped, as
                        `| trim` leaves them), spell the real text, the positions are proven. This is the usual case.
    turn by turn        Otherwise, one rendering for each turn. The real text must end with the text after the
                        sentinel. The content ends where that text begins, whatever the template did to the content
                        (reasoning removed, JSON escaped).

A turn that calls tools is located by sentinels in place of the functions' names. It ends after the last arguments, by
the text that a probe showed there, or where a rendering that stops after this turn ends (`_span_of_calls`).

A supervised span starts where the generation prompt ends, because from there on the model writes. So an empty
`<think></think>` that the template puts before the content is learned, and so is the header of a turn if the template
has no generation prompt. A span ends after the end-of-turn token, before the newline that follows it. A probe of two
messages measures once for each template what the generation prompt, the text between it and the content, and the end
of a turn are (`TurnFrame`). If a template cannot be read in these ways, the row is a bad row; nothing is guessed.

Cost: one rendering per conversation for (a), two for (b), and two or three more for each turn located by itself.
Templates run only in transformers' immutable Jinja sandbox, with limits on time and memory.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import pairwise, product
from typing import Any

from fxtune.data.formats.chat_format import SYSTEM_ROLES
from fxtune.data.formats.image_parts import IMAGE
from fxtune.data.formats.row_format import BEGUN, OPEN
from fxtune.data.formats.values import RowError
from fxtune.errors import DataError
from fxtune.system.resource_limits import LimitExceeded, limit_resources

Messages = Sequence[dict[str, Any]]
Tools = list[dict[str, Any]] | None
Span = tuple[int, int]

RESERVED = frozenset(
    ("messages", "conversations", "tools", "chat_template", "add_generation_prompt", "continue_final_message")
)
"""Variables of a template that fxtune sets."""
_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_MARKS = re.compile(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}")
_ADVICE = "put {% generation %} marks around the assistant's turns in a template of your own (data.chat_template=FILE)"


@dataclass(frozen=True)
class TurnFrame:
    """What a template writes around an assistant's content, measured on a probe."""

    prompt: str = ""
    """The generation prompt, such as `<|im_start|>assistant\\n`; empty if the template has none (Mistral)."""
    leads: tuple[str, ...] = ()
    """Possible texts between the generation prompt and the content, longest first."""
    endings: tuple[str, ...] = ()
    """Possible texts from the content to the end-of-turn token, longest first."""
    overrun: int | None = None
    """How many characters behind the content a generation mark includes; None: no usable marks."""
    marked_prompt: str = ""
    """The end of the generation prompt that a generation mark includes, such as an empty block of reasoning."""


@dataclass(frozen=True)
class CallStyle:
    """The form in which a template takes tool calls, measured on a probe."""

    is_written: bool = True
    arguments_as_text: bool = False
    """Arguments are a JSON string (DeepSeek), not an object."""
    content: tuple[str | None, ...] = ()
    """The content of a turn that has none: () for no such key, (None,) for null (DeepSeek), ("",)."""
    short_ids: bool = False
    """Each call and its result have an id of nine letters and digits (Mistral)."""


class ChatTemplate:
    """Jinja source and its variables.

    Args:
        source: the Jinja text.
        variables: bos_token, eos_token and the like, as `apply_chat_template` passes them, and the user's.
        special_tokens: the tokenizer's special tokens, to recognize the end of a turn.

    Raises:
        DataError: the template does not compile, or tries to leave the sandbox.
    """

    def __init__(self, source: str, variables: dict[str, Any], special_tokens: Sequence[str]) -> None:
        self.source = source
        self.variables = variables
        alternatives = "|".join(re.escape(token) for token in sorted(special_tokens, key=len, reverse=True) if token)
        self._rewritten: dict[tuple[Any, ...], bool] = {}
        self._asking: dict[tuple[Any, ...], bool] = {}
        self._special = re.compile(alternatives or "(?!)")
        self._ending = re.compile(rf"\s*(?:{self._special.pattern})")
        self._takes_parts_only, self._unasked_prompt, self._between = False, "", ""
        self.next_header = self._header_behind_calls = ""
        self._takes_parts_only = self._writes_parts_only()
        self._measure_last_end()
        self.has_marks = bool(_MARK.search(source))
        frame = self._measure_frame()
        if frame is not None and frame.overrun is None:
            # transformers misplaces marks inside a macro or a {% set %} block, and some templates mark only the last
            # turn: marks that miss the probe's content cannot be trusted on any row.
            self.has_marks = False
        self.frame = frame or TurnFrame()

    @property
    def writes_empty_reasoning(self) -> bool:
        """Whether an answer without reasoning begins with an empty block of reasoning."""
        return any("</think>" in lead for lead in self.frame.leads)

    def render(
        self, messages: Messages, tools: Tools = None, *, prompt: bool = False, marks: bool = False
    ) -> tuple[str, list[Span]]:
        """The text and, with `marks`, the spans of its generation marks. `prompt`: append the generation prompt.

        Raises:
            RowError: the template refuses these messages (the message quotes it) or fails on them.
            DataError: no row can be rendered: the syntax is wrong, the template tries to leave the sandbox, or it
                needs more time or memory than any rendering can need.
        """
        from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError, UndefinedError
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            with limit_resources():
                rendered: Any = render_jinja_template(
                    conversations=[[_with_parts(message, self._takes_parts_only) for message in messages]],
                    tools=list(tools) if tools is not None else None,
                    chat_template=self.source,
                    add_generation_prompt=prompt,
                    return_assistant_tokens_mask=marks,
                    **self.variables,
                )
        except LimitExceeded as limit:
            raise DataError(
                f"the chat template was stopped: it needs {limit} for a conversation of {len(messages)} messages. "
                "Correct it, or name another in data.chat_template"
            ) from None
        except MemoryError:
            raise  # in a thread, where work has no limits
        except TemplateSyntaxError as error:
            raise _does_not_compile(error) from None
        except SecurityError as error:
            raise DataError(f"the chat template tries to leave its sandbox and is refused: {error}") from None
        except TemplateError as error:
            unknown = re.fullmatch(r"'(\w+)' is undefined", str(error))
            if isinstance(error, UndefinedError) and unknown and re.search(rf"\b{unknown[1]}\s*\(", self.source):
                raise DataError(
                    f"the chat template calls {unknown[1]}(), which templates do not have; they have raise_exception "
                    "and strftime_now, which writes the time. Correct it, or name another in data.chat_template"
                ) from None
            reason = re.sub(r"(?<!\.)\.$", "", str(error))
            raise RowError(f"the chat template refuses this conversation: {reason}") from None
        except Exception as error:  # noqa: BLE001 - a template is foreign code and can raise anything
            raise RowError(f"the chat template fails on this conversation: {type(error).__name__}: {error}") from None
        (text,), spans = rendered
        if not prompt:
            text = text.removesuffix(self._unasked_prompt)
            if messages and messages[-1]["role"] == "assistant":
                text += self._header_behind_calls if "tool_calls" in messages[-1] else self.next_header
        return text, spans[0] if marks else []

    def _writes_parts_only(self) -> bool:
        """Whether the template writes contents that are lists of parts, and drops texts (SmolVLM's does)."""
        words = ["".join(unused_characters(self.source)) + role for role in ("user", "assistant")]
        chat = [{"role": role, "content": word} for role, word in zip(("user", "assistant"), words, strict=True)]
        for self._takes_parts_only in (False, True):
            try:
                text, _ = self.render(chat)
            except RowError:
                continue
            if all(word in text for word in words):
                return self._takes_parts_only
        return False

    def adapted(self, messages: Messages) -> Messages:
        """The messages with the roles that this template knows, and with their calls in the form that it takes. Raises
        RowError if it writes no calls."""
        if any(message["role"] == "developer" for message in messages) and not self._knows_developer:
            messages = [
                message | {"role": "system"} if message["role"] == "developer" else message for message in messages
            ]
        calling = next((index for index, message in enumerate(messages) if "tool_calls" in message), None)
        if calling is None:
            return messages
        if not self._call_style.is_written:
            raise RowError(
                f"the chat template writes no tool calls, as messages[{calling}] has; name one that does in "
                "data.chat_template=FILE"
            )
        return _with_call_style(messages, self._call_style)

    def rewritten_turns(self, messages: Messages, supervised: Sequence[bool], tools: Tools = None) -> list[int]:
        """The learned turns that this template writes otherwise once the next learned turn, or the last message,
        follows.

        Sampling has the text up to a turn's end as the template writes it when the turn is the last one. A template
        that drops the reasoning of earlier answers, ends the last turn with another token, or moves the tools behind
        earlier turns, writes another text later. This is tried with a short conversation of the same shape, once a
        shape.
        """
        turns = [index for index, learned in enumerate(supervised) if learned]
        ends = sorted({*turns, len(messages) - 1}) if turns else []
        return [turn for turn, later in pairwise(ends) if self._is_rewritten(messages, turn, later, tools)]

    def asks_otherwise(self, messages: Messages, turn: int, tools: Tools = None) -> bool:
        """Whether the text up to a turn's end, written as the last one, does not begin with the turn's prompt in
        sampling (DeepSeek-R1's prompt opens a block of reasoning, and its text of an answer has none)."""
        if messages[turn]["role"] != "assistant":
            return False
        part, length, key = self._exchange(messages, turn, turn, tools)
        if key not in self._asking:
            try:
                prompt, _ = self.render(part[: length - 1], [_PLAIN_TOOL] if tools else None, prompt=True)
                text, _ = self.render(part, [_PLAIN_TOOL] if tools else None)
            except RowError:
                prompt = text = ""
            self._asking[key] = not text.startswith(prompt)
        return self._asking[key]

    def _is_rewritten(self, messages: Messages, turn: int, later: int, tools: Tools) -> bool:
        part, length, key = self._exchange(messages, turn, later, tools)
        if key not in self._rewritten:
            try:
                learned, schemas = [index == length - 1 for index in range(length)], [_PLAIN_TOOL] if tools else None
                alone, ((_, end),) = self.supervised_spans(part[:length], learned, schemas)
                followed, _ = self.render(part, schemas)
            except RowError:  # the template looks at what a part holds
                alone, end, followed = "", 0, ""
            self._rewritten[key] = not followed.startswith(alone[:end])
        return self._rewritten[key]

    def _exchange(
        self, messages: Messages, turn: int, later: int, tools: Tools
    ) -> tuple[list[dict[str, Any]], int, tuple[Any, ...]]:
        """(the system messages and the turns from the question of `turn` to `later`, with made-up text; how many
        of these messages end with `turn`; their shape)."""
        head = next((index for index, message in enumerate(messages) if message["role"] not in SYSTEM_ROLES), 0)
        begin = max((index for index in range(head, turn) if messages[index]["role"] == "user"), default=head)
        part = [*messages[:head], *messages[begin : later + 1]]
        length = head + turn - begin + 1
        for known in (self._rewritten, self._asking):
            if len(known) > 10_000:
                known.clear()
        return (
            [_plain(message, number) for number, message in enumerate(part)],
            length,
            (length, bool(tools), *map(_shape, part)),
        )

    def supervised_spans(
        self, messages: Messages, supervised: Sequence[bool], tools: Tools = None
    ) -> tuple[str, list[Span]]:
        """Render, and find the spans that the model learns.

        Args:
            messages, tools: of a Conversation (formats/row_format.py), with the calls as adapted() returns them.
            supervised: for each message, True if the model learns it.

        Returns:
            The text, and the ascending, disjoint (start, end) character spans, one for each True in `supervised`.

        Raises:
            RowError: the template refuses the conversation, or its turns cannot be located with certainty.
        """
        text, marks = self.render(messages, tools, marks=self.has_marks)
        assistants = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        turns = [index for index, learned in enumerate(supervised) if learned]
        if self.has_marks and len(marks) == len(assistants) and set(turns) <= set(assistants):
            return text, [
                self._bounded(text, self._span_of_mark(text, *mark), messages[index])
                for index, mark in zip(assistants, marks, strict=True)
                if supervised[index]
            ]
        if not turns:
            return text, []
        plain = [index for index in turns if "tool_calls" not in messages[index]]
        found = self._spans_at_once(
            text, messages, [index for index in turns if index in plain or not messages[index].get("content")], tools
        )
        if found is None and 0 < len(plain) < len(turns):
            found = self._spans_at_once(text, messages, plain, tools)
        spans = [
            self._bounded(
                text,
                (found or {}).get(index)
                or (self._span_of_turn if index in plain else self._span_of_calls)(text, messages, index, tools),
                messages[index],
            )
            for index in turns
        ]
        for (_, end), (start, _), index in zip(spans, spans[1:], turns[1:], strict=False):
            if start < end:
                raise RowError(f"the chat template writes messages[{index}] inside an earlier turn; {_ADVICE}")
        return text, spans

    def _span_of_mark(self, text: str, start: int, end: int) -> Span:
        """The span of a generation mark, but ended after the end-of-turn token: marks may end before it, or after the
        newline behind it. If no such token is found, the mark's own end stays."""
        if text.startswith(self.frame.marked_prompt, start):
            start += len(self.frame.marked_prompt)
        content_end = end - (self.frame.overrun or 0)
        turn_end = self._turn_end(text, content_end)
        return (start, turn_end) if turn_end > content_end >= start else (start, end)

    def _turn_end(self, text: str, content_end: int) -> int:
        for ending in self.frame.endings:
            if text.startswith(ending, content_end):
                return content_end + len(ending)
        return content_end

    def _bounded(self, text: str, span: Span, message: dict[str, Any]) -> Span:
        """The part of a turn's span that is learned. If turns have no end, the next turn's first token ends it. What a
        prompt has begun is not learned, and a turn that stays open has no end."""
        start, end = span
        if self.next_header and not text.endswith(self.next_header, start, end):
            found = self._ending.match(text, end)
            end = found.end() if found else end
        if not {BEGUN, OPEN} & message.keys():
            return start, end
        content_end = end - next(
            (len(ending) for ending in self.frame.endings if text.endswith(ending, start, end)), 0
        )
        begun = message.get(BEGUN, "")
        for written, skipped in ((message["content"], begun), (message["content"].strip(), begun.lstrip())):
            if (at := text.rfind(written, start, content_end)) >= 0:
                return at + len(skipped) if begun else start, content_end if OPEN in message else end
        raise RowError(
            "the chat template changes the text of a begun turn, so where the answer goes on is not certain"
        )

    def _lead_length(self, before: str, message: dict[str, Any]) -> int | None:
        """How many characters at the end of `before`, the text up to a content, the model writes itself."""
        if message["role"] != "assistant":
            return 0
        for lead in self._leads_of_calls if "tool_calls" in message else self.frame.leads:
            if before.endswith(self.frame.prompt + lead):
                return len(lead)
        return None

    def _spans_at_once(self, text: str, messages: Messages, turns: list[int], tools: Tools) -> dict[int, Span] | None:
        """The spans of these turns by one more rendering; None if it proves nothing."""
        if any("reasoning_content" in messages[index] for index in turns):
            return None
        opening, closing = unused_characters(text)
        variant = list(messages)
        values: list[str] = []  # what each sentinel stands for
        first: dict[int, int] = {}  # sentinel -> its turn, for the first of each turn
        last: dict[int, int] = {}
        contents = set()
        for index in turns:
            message = variant[index]
            first[len(values)] = index
            if "tool_calls" in message:
                calls = message["tool_calls"]
                marked = [
                    _renamed(call, f"{opening}{number}{closing}") for number, call in enumerate(calls, len(values))
                ]
                variant[index] = {**message, "tool_calls": marked}
                values += [call["function"]["name"] for call in calls]
                last[len(values) - 1] = index
            else:
                variant[index] = {**message, "content": f"{opening}{len(values)}{closing}"}
                last[len(values)] = index
                contents.add(len(values))
                values.append(message["content"])
        try:
            rendered, _ = self.render(variant, tools)
        except RowError:
            return None  # the template reads the content; turn by turn it may still pass
        parts = re.split(f"{opening}([0-9]+){closing}", rendered)
        numbers, pieces = [int(number) for number in parts[1::2]], parts[::2]
        if list(dict.fromkeys(numbers)) != list(range(len(values))):
            return None
        for as_written in (str, str.strip):
            written = [as_written(values[number]) for number in numbers]
            if text == pieces[0] + "".join(
                content + piece for content, piece in zip(written, pieces[1:], strict=True)
            ):
                break
        else:
            return None
        spans: dict[int, Span] = {}
        seen = position = start = 0
        for number, piece, value, behind in zip(numbers, pieces, written, pieces[1:], strict=False):
            position += len(piece)
            if number < seen:
                if number in contents:
                    return None  # a content that is written twice
                position += len(value)
                continue
            seen += 1
            if number in first:
                lead = self._lead_length(piece, messages[first[number]])
                if lead is None:
                    return None
                start = position - lead
            position += len(value)
            if number in last:
                message = messages[last[number]]
                end = self._end_of_call(message, behind) if "tool_calls" in message else None
                if "tool_calls" in message and end is None:
                    return None
                spans[last[number]] = start, self._turn_end(text, position) if end is None else position + end
        return spans

    def _end_of_call(self, message: dict[str, Any], behind: str) -> int | None:
        """Where the turn ends in `behind`, the text after the name of its last call; None if that is not certain."""
        arguments = message["tool_calls"][-1]["function"].get("arguments")
        head, tail = self._around_arguments
        written = (
            head + (arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)) + tail
        )
        return len(written) if tail and behind.startswith(written) else None

    @cached_property
    def _around_arguments(self) -> tuple[str, str]:
        """The text between a call's name and its arguments, and that from there to the end of the turn; empty if it
        varies."""
        opening, closing = unused_characters(self.source)
        name, arguments = f"{opening}?{closing}", {"a": opening}
        user = {"role": "user", "content": "?"}
        chat = [user, _calling(name, arguments)]
        try:
            texts = [
                self.render(_with_call_style(messages, self._call_style))[0].rpartition(name)[2]
                for messages in (chat, [*chat, user])
            ]
        except RowError:
            return "", ""
        head, _, tail = texts[0].partition(json.dumps(arguments, ensure_ascii=False))
        same = texts[1].startswith(texts[0].rstrip()) and tail.strip()
        return (head, tail.rstrip()) if same else ("", "")

    def _span_of_turn(self, text: str, messages: Messages, index: int, tools: Tools) -> Span:
        """The span of one turn by a rendering of its own."""
        opening, closing = unused_characters(text)
        content, reasoning = f"{opening}0{closing}", f"{opening}1{closing}"
        changed = {**messages[index], "content": content}
        if "reasoning_content" in changed:
            changed["reasoning_content"] = changed["thinking"] = reasoning
        rendered, _ = self.render(_replaced(messages, index, changed), tools)
        if (times := rendered.count(content)) != 1:
            raise RowError(f"the chat template writes the content of messages[{index}] {times} times; {_ADVICE}")
        before, _, after = rendered.partition(content)
        end = len(text) - len(after)
        if not text.endswith(after):
            raise RowError(f"the content of messages[{index}] changes what the chat template writes later; {_ADVICE}")
        start = self._turn_start(text, before, before.partition(reasoning)[0], messages, index, tools)
        if start is None or start > end:
            raise RowError(f"the content of messages[{index}] changes what the chat template writes before; {_ADVICE}")
        return start, self._turn_end(text, end)

    def _span_of_calls(self, text: str, messages: Messages, index: int, tools: Tools) -> Span:
        """The span of a turn with tool calls. It starts with the first thing that varies, and ends behind the last
        call, where a rendering that stops after this turn ends."""
        opening, closing = unused_characters(text)
        calls = messages[index]["tool_calls"]
        last = f"{opening}{len(calls) - 1}{closing}"
        marked = dict(
            messages[index], tool_calls=[_renamed(call, f"{opening}{n}{closing}") for n, call in enumerate(calls)]
        )
        for key in ("content", "reasoning_content", "thinking"):
            if marked.get(key):
                marked[key] = f"{opening}{key}{closing}"
        rendered, _ = self.render(_replaced(messages, index, marked), tools)
        if last not in rendered:
            raise RowError(f"the chat template does not write tool_calls[{len(calls) - 1}] of messages[{index}]")
        before = rendered[: rendered.index(opening)]
        start = self._start_by_the_turn_before(text, before, messages, index, marked, tools)
        if start is None:
            start = self._turn_start(text, before, before, messages, index, tools)
        renamed = dict(messages[index], tool_calls=[*calls[:-1], _renamed(calls[-1], last)])
        name = calls[-1]["function"]["name"]
        conversation = _replaced(messages, index, renamed)
        after = self.render(conversation, tools)[0].partition(last)[2].replace(last, name)
        turn = after
        if index + 1 < len(messages):
            stopped = self.render(conversation[: index + 1], tools)[0].partition(last)[2].replace(last, name)
            turn = os.path.commonprefix([after, stopped])  # noqa: RUF071 - of characters
            if turn != stopped:  # a turn ends differently at the end of the conversation
                found = next((ending for ending in self._ending.finditer(after) if ending.end() > len(turn)), None)
                turn = after[: found.end()] if found is not None and found.start() <= len(turn) else ""
        if start is None or not turn or not text.endswith(after):
            raise RowError(
                f"the tool calls of messages[{index}] cannot be found in the chat template's text; {_ADVICE}"
            )
        return start, len(text) - len(after) + len(turn.rstrip())

    def _start_by_the_turn_before(
        self, text: str, before: str, messages: Messages, index: int, marked: dict[str, Any], tools: Tools
    ) -> int | None:
        """Where a turn with calls starts: after the generation prompt. The text between the content of the message
        before and the turn shows this place; None if it does not."""
        lead = self._lead_length(before, messages[index])
        if lead is not None and text.startswith(before[: len(before) - lead]):
            return len(before) - lead
        if not index:
            return None
        opening, closing = unused_characters(text)
        sentinel = closing + closing
        earlier = _replaced(messages[:index], index - 1, {**messages[index - 1], "content": sentinel})
        try:
            prompt = self.render(earlier, tools, prompt=True)[0].rpartition(sentinel)
            rest = self.render([*earlier, marked, *messages[index + 1 :]], tools)[0].rpartition(sentinel)[2]
        except RowError:
            return None
        between = rest[: rest.index(opening)] if opening in rest else ""
        start = len(before) - len(between) + len(prompt[2])
        if prompt[1] and between.startswith(prompt[2]) and text.startswith(before[:start]):
            return start
        return None

    @cached_property
    def _knows_developer(self) -> bool:
        """Whether the template has words of its own for the role developer.

        Many templates copy the name of any role into the text. They do not know the role: they write any
        unknown role in the same way.
        """
        texts = []
        for role in ("developer", "unheardof"):
            try:
                text, _ = self.render([{"role": role, "content": "Rule."}, {"role": "user", "content": "Question?"}])
            except RowError:
                text = ""
            texts.append(text.lower())
        return "rule." in texts[0] and texts[0] != texts[1].replace("unheardof", "developer")

    @cached_property
    def _call_style(self) -> CallStyle:
        """The first form of a call whose name and arguments this template writes, and not as Python's repr."""
        opening, closing = unused_characters(self.source)
        name, key, value = (f"{opening}{number}{closing}" for number in range(3))
        chat = [{"role": "user", "content": "?"}, _calling(name, {key: value})]
        contents: tuple[tuple[str | None, ...], ...] = ((), (None,), ("",))
        for short_ids, as_text, content in product((False, True), (False, True), contents):
            style = CallStyle(True, as_text, content, short_ids)
            try:
                text, _ = self.render(_with_call_style(chat, style))
            except RowError:
                continue
            if all(part in text for part in (name, key, value)) and f"'{key}'" not in text:
                return style
        return CallStyle(is_written=False)

    @cached_property
    def _leads_of_calls(self) -> tuple[str, ...]:
        """Possible texts between the generation prompt and the first variable part of a turn with calls (its
        reasoning, its content or a function's name), longest first."""
        opening, closing = unused_characters(self.source)
        question, sentinel = f"{opening}?{closing}", f"{opening}!{closing}"
        rest = [
            {"role": "tool", "content": "r"},
            {"role": "assistant", "content": "a"},
            {"role": "user", "content": "u"},
        ]
        leads = set()
        for extra in ({}, {"content": sentinel}, {"reasoning_content": sentinel, "thinking": sentinel}):
            turn = _calling(sentinel, {"a": "b"}) | extra
            for later in ([], rest):
                chat = _with_call_style([{"role": "user", "content": question}, turn, *later], self._call_style)
                try:
                    between = self.render(chat)[0].rpartition(question)[2].partition(sentinel)
                except RowError:
                    continue
                _, prompt, lead = between[0].partition(self.frame.prompt or opening)
                if prompt and between[1]:
                    leads.add(lead)
        return _longest_first(leads)

    def _turn_start(
        self, text: str, before: str, constant: str, messages: Messages, index: int, tools: Tools
    ) -> int | None:
        """Where in `text` the generation prompt of a turn ends.

        `before` is the text up to the sentinel content in a rendering with sentinels, `constant` the part of it
        before the sentinel reasoning.
        """
        lead = self._lead_length(before, messages[index])
        if lead is not None and text.startswith(before[: len(before) - lead]):
            return len(before) - lead
        # The generation prompt may depend on the conversation: render it. It counts only if it includes the
        # message before it, because a template that writes nothing until the assistant has spoken would
        # make everything supervised.
        sentinel = "".join(unused_characters(text))
        earlier = list(messages[:index])
        try:
            prompt, _ = self.render(earlier, tools, prompt=True)
            if earlier:
                earlier[-1] = {**earlier[-1], "content": sentinel}
            with_sentinel, _ = self.render(earlier, tools, prompt=True)
        except RowError:
            prompt = with_sentinel = ""
        if prompt and text.startswith(prompt) and (not earlier or sentinel in with_sentinel):
            return len(prompt)
        if self.frame.prompt and self._same_for_a_user(text, before, messages, index, tools):
            return None
        return len(constant) if text.startswith(constant) else None

    def _same_for_a_user(self, text: str, before: str, messages: Messages, index: int, tools: Tools) -> bool:
        """Whether the text before a turn would be the same for a user turn, so that it does not say that the assistant
        speaks. (Llama-3.1 writes its tools and the first message, of whatever role, into one user turn.)"""
        opening, closing = unused_characters(text)
        content = f"{opening}0{closing}"
        try:
            rendered, _ = self.render(_replaced(messages, index, {"role": "user", "content": content}), tools)
        except RowError:
            return False
        return rendered.partition(content)[0] == before

    def _measure_frame(self) -> TurnFrame | None:
        """Measure the frame on a conversation of sentinels; None if the template refuses a plain conversation."""
        opening, closing = unused_characters(self.source)
        question, answer, system = (f"{opening}{number}{closing}" for number in range(3))
        user = {"role": "user", "content": question}
        for earlier in ([user], [{"role": "system", "content": system}, user]):
            chat = [*earlier, {"role": "assistant", "content": answer}]
            try:
                text, marks = self.render(chat, marks=self.has_marks)
                prompted, _ = self.render(earlier, prompt=True)
                unprompted, _ = self.render(earlier)
                continued, _ = self.render(chat, prompt=True)
            except RowError:
                continue
            if text.count(answer) == 1:
                break
        else:
            return None
        before, _, after = text.partition(answer)
        prompt = prompted[len(unprompted) :] if prompted.startswith(unprompted) else ""
        leads = {""} if prompt else set()
        if before.startswith(prompted):
            leads.add(before[len(prompted) :])
        # A turn may end differently at the end of the conversation and before another turn (gpt-oss). The second
        # ending is measured before the next generation prompt, where no other role's header can be mistaken for it.
        # If the first one goes on with more (Phi-3's end of the text), that is not part of the turn.
        behind, tails = continued.partition(answer)[2], [after]
        if prompt and behind.endswith(prompt):
            tails.append(behind[: len(behind) - len(prompt)])
        inside = tails[1] if tails[1:] else os.path.commonprefix([after, self._between])  # noqa: RUF071 - of characters
        if self._special.search(inside) and after.startswith(inside):
            tails = [inside]
        endings = {self._last_ending(tail) for tail in tails} - {""}
        overrun, marked_prompt = None, ""
        if len(marks) == 1:
            start, end = marks[0]
            content_end = len(before) + len(answer)
            if start <= len(before) and content_end <= end <= len(text):
                overrun = end - content_end
                if before.startswith(prompted):
                    marked_prompt = prompted[start:]
        return TurnFrame(prompt, _longest_first(leads), _longest_first(endings), overrun, marked_prompt)

    def _last_ending(self, tail: str) -> str:
        """Up to the last special token behind a content: a turn may end with several. Without one, all of it (an end
        of turn in plain letters)."""
        ends = [found.end() for found in self._special.finditer(tail)]
        return tail[: ends[-1]] if ends else tail.rstrip()

    def _measure_last_end(self) -> None:
        """Measure what follows an answer: `_between`, the text up to the next question; and what render() changes.

        Command R7B's template writes the generation prompt unasked (`_unasked_prompt`): no text may end with it.
        Models of GLM stop at the first token of the next turn, `<|user|>`, or `<|observation|>` after calls
        (`next_header`, `_header_behind_calls`; empty where turns have an end): the last turn needs it, too.
        """
        opening, closing = unused_characters(self.source)
        question, answer = f"{opening}0{closing}", f"{opening}1{closing}"
        user = {"role": "user", "content": question}
        chat = [user, {"role": "assistant", "content": answer}, user]
        try:
            asked = self.render(chat[:1], prompt=True)[0]
            unasked, ended, followed = (self.render(chat[:count])[0] for count in (1, 2, 3))
        except RowError:
            return
        self._between = followed.rpartition(answer)[2].partition(question)[0]
        behind, tail = unasked.rpartition(question)[2], ended.rpartition(answer)[2]
        begin = self.variables.get("bos_token")
        openers = [token for token in self._special.findall(unasked) if token != begin]
        if asked == unasked and openers:
            common = os.path.commonprefix([behind[::-1], tail[::-1]])[::-1]  # noqa: RUF071 - of characters
            at = common.rfind(openers[0])  # a header begins with the token that begins the text
            if at >= 0 and self._special.search(tail, 0, len(tail) - len(common) + at):
                self._unasked_prompt = common[at:]
        header = self._ending.match(self._between)
        if header and not tail.strip() and header[0].strip() != begin and header[0].startswith(tail):
            self.next_header = header[0][len(tail) :]
            turns = [user, _calling(answer, {"a": "b"}), {"role": "tool", "content": "r"}]
            with suppress(RowError):
                ended, followed = (
                    self.render(_with_call_style(turns[:count], self._call_style))[0] for count in (2, 3)
                )
                found = self._ending.match(followed, len(ended)) if followed.startswith(ended) else None
                self._header_behind_calls = found[0] if found else ""


def undeclared_variables(source: str) -> set[str]:
    """The variables that a template reads. Raises DataError if it does not compile."""
    from jinja2 import Environment, TemplateSyntaxError, meta

    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    try:
        return meta.find_undeclared_variables(environment.parse(_MARKS.sub("", source)))
    except TemplateSyntaxError as error:
        raise _does_not_compile(error) from None


def _does_not_compile(error: Any) -> DataError:
    return DataError(
        f"the chat template does not compile: line {error.lineno}: {error.message}. Correct it, or name another in "
        "data.chat_template"
    )


_PLAIN_TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}},
}


def _shape(message: dict[str, Any]) -> tuple[Any, ...]:
    """All of a message that a template may look at, without its words."""
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
    """A message of the same shape, with made-up text that no other message has: Mistral's template finds the last
    question by comparing messages."""
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


def _with_parts(message: dict[str, Any], always: bool) -> dict[str, Any]:
    """A message as templates take it: its content is a list of parts if it has images, or `always`."""
    message = {key: value for key, value in message.items() if key not in (BEGUN, OPEN)}
    content = message.get("content")
    if not isinstance(content, str) or not (always or IMAGE in content):
        return message
    parts: list[dict[str, str]] = []
    for text in re.split(f"({IMAGE})", content):
        parts += [{"type": "image"}] if text == IMAGE else [{"type": "text", "text": text}] if text else []
    return {key: value for key, value in message.items() if key != "images"} | {"content": parts}


def _calling(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call]}


def _renamed(call: dict[str, Any], name: str) -> dict[str, Any]:
    return {**call, "function": {**call["function"], "name": name}}


def _with_call_style(messages: Messages, style: CallStyle) -> list[dict[str, Any]]:
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


def _replaced(messages: Messages, index: int, message: dict[str, Any]) -> list[dict[str, Any]]:
    return [*messages[:index], message, *messages[index + 1 :]]


def _longest_first(texts: set[str]) -> tuple[str, ...]:
    return tuple(sorted(texts, key=len, reverse=True))


def unused_characters(text: str) -> tuple[str, str]:
    """Two private-use characters that do not occur in `text`. No template trims or splits at
    them, or changes their case."""
    free = (chr(code) for code in range(0xF8000, 0x10FFFE) if chr(code) not in text and code & 0xFFFE != 0xFFFE)
    return next(free), next(free)
