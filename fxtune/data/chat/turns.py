"""Finds the characters of a rendered chat that the model learns.

A template turns messages into one text, and the loss mask needs the character span of every assistant turn in it. A
search for the content of a turn would not work: templates trim contents and remove the reasoning of earlier turns, and
users quote answers. Two methods are exact:

(a) `{% generation %}` marks: the template marks the spans itself, and transformers returns them.

(b) Sentinels, for templates without marks (the published ones of Llama-3.1, Qwen3 and Gemma-3): render once more with
private-use characters, the sentinels, in place of the assistant's contents. The template writes the text around them.
The rest of the real text is the contents:

    all turns at once   If the pieces between the sentinels, joined with the contents as given (or stripped, as
                        `| trim` leaves them), spell the real text, the positions are proven. This is the usual case.
    turn by turn        Otherwise, one rendering for each turn. The real text must end with the text after the
                        sentinel. The content ends where this later text begins, whatever the template did to the
                        content (reasoning removed, JSON escaped).

A turn that calls tools is located by sentinels in place of the functions' names. A probe shows the text between the
last arguments and the end of the turn. If this text varies, a rendering that stops after the turn shows the end
(`span_of_calls`).

A supervised span starts at the end of the generation prompt, where the model begins to write. So an empty
`<think></think>` that the template puts before the content is learned, and so is the header of a turn if the template
has no generation prompt. A span ends after the end-of-turn token, before the newline that follows it. For each
template a probe of two messages measures the generation prompt, the text between this prompt and the content, and the
end of a turn (`TurnFrame`). A row for which these methods fail is a bad row; nothing is guessed.

Cost: one rendering per conversation for (a), two for (b), and two or three more for each turn located by itself.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

from fxtune.data.chat.calls import renamed
from fxtune.data.chat.template import ChatTemplate, Messages, Span, Tools, unused_characters
from fxtune.data.formats.row_format import BEGUN, OPEN
from fxtune.data.formats.values import RowError

ADVICE = "put {% generation %} marks around the assistant's turns in a template of your own (data.chat_template=FILE)"


def supervised_spans(
    template: ChatTemplate, messages: Messages, supervised: Sequence[bool], tools: Tools = None
) -> tuple[str, list[Span]]:
    """Render a conversation, and find the spans that the model learns.

    Args:
        messages, tools: from a Conversation (formats/row_format.py); the messages as ChatTemplate.adapted() returns
            them.
        supervised: for each message, True if the model learns it.

    Returns:
        The text, and the ascending, disjoint (start, end) character spans, one for each True in `supervised`.

    Raises:
        RowError: the template refuses the conversation, or its turns cannot be located with certainty.
    """
    text, marks = template.render(messages, tools, marks=template.has_marks)
    assistants = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    turns = [index for index, learned in enumerate(supervised) if learned]
    chat = _RenderedChat(template, text, messages, tools)
    if template.has_marks and len(marks) == len(assistants) and set(turns) <= set(assistants):
        by_turn = dict(zip(assistants, marks, strict=True))
        return text, [chat.learned_part(index, chat.span_of_mark(*by_turn[index])) for index in turns]
    if not turns:
        return text, []
    plain = [index for index in turns if "tool_calls" not in messages[index]]
    found = chat.spans_at_once([index for index in turns if index in plain or not messages[index].get("content")])
    if found is None and 0 < len(plain) < len(turns):
        found = chat.spans_at_once(plain)
    spans = []
    for index in turns:
        span = (found or {}).get(index) or (chat.span_of_turn if index in plain else chat.span_of_calls)(index)
        spans.append(chat.learned_part(index, span))
        if spans[1:] and spans[-1][0] < spans[-2][1]:
            raise RowError(f"the chat template writes messages[{index}] inside an earlier turn; {ADVICE}")
    return text, spans


class _Sentinel(NamedTuple):
    value: str
    """The real text in place of the sentinel."""
    turn: int
    is_first: bool
    """Whether it is the first sentinel of its turn."""
    is_last: bool
    is_content: bool


class _RenderedChat:
    """Locates the turns of a chat in its real text."""

    def __init__(self, template: ChatTemplate, text: str, messages: Messages, tools: Tools) -> None:
        self.template, self.frame = template, template.frame
        self.text, self.messages, self.tools = text, messages, tools

    @cached_property
    def _brackets(self) -> tuple[str, str]:
        """The characters around each sentinel."""
        return unused_characters(self.text)

    def _sentinel(self, name: Any) -> str:
        return f"{self._brackets[0]}{name}{self._brackets[1]}"

    def _render(self, changed: dict[int, dict[str, Any]], end: int | None = None, prompt: bool = False) -> str:
        """The text of the first `end` messages. `changed`: {index: the message to render in place of this one}.
        `prompt`: add the generation prompt."""
        messages = [changed.get(index, message) for index, message in enumerate(self.messages[:end])]
        return self.template.render(messages, self.tools, prompt=prompt)[0]

    def span_of_mark(self, start: int, end: int) -> Span:
        """The span of a generation mark, with its end moved to the end-of-turn token. Marks may end before this token,
        or after the newline that follows it. Without an end-of-turn token the span ends with the mark."""
        if self.text.startswith(self.frame.marked_prompt, start):
            start += len(self.frame.marked_prompt)
        content_end = end - (self.frame.overrun or 0)
        turn_end = self._turn_end(content_end)
        return (start, turn_end) if turn_end > content_end >= start else (start, end)

    def _turn_end(self, content_end: int) -> int:
        endings = self.frame.endings
        return content_end + next((len(end) for end in endings if self.text.startswith(end, content_end)), 0)

    def learned_part(self, index: int, span: Span) -> Span:
        """The learned part of a turn's span. If the template ends no turns, the part ends with the next turn's first
        token. The beginning of a turn that a prompt has, and the end of a turn that stays open, are not learned."""
        (start, end), message, header = span, self.messages[index], self.template.next_header
        if header and not self.text.endswith(header, start, end):
            found = self.template.ending.match(self.text, end)
            end = found.end() if found else end
        if not {BEGUN, OPEN} & message.keys():
            return start, end
        endings = self.frame.endings
        content_end = end - next((len(ending) for ending in endings if self.text.endswith(ending, start, end)), 0)
        begun = message.get(BEGUN, "")
        for written, skipped in ((message["content"], begun), (message["content"].strip(), begun.lstrip())):
            if (at := self.text.rfind(written, start, content_end)) >= 0:
                return at + len(skipped) if begun else start, content_end if OPEN in message else end
        raise RowError(
            "the chat template changes the text of a begun turn, so where the answer goes on is not certain"
        )

    def _lead_length(self, before: str, index: int) -> int | None:
        """The number of characters at the end of `before`, the text up to a turn's content, that the model writes
        itself: they follow the generation prompt. None if the generation prompt is not found."""
        message = self.messages[index]
        if message["role"] != "assistant":
            return 0
        for lead in self.template.leads_of_calls if "tool_calls" in message else self.frame.leads:
            if before.endswith(self.frame.prompt + lead):
                return len(lead)
        return None

    def spans_at_once(self, turns: list[int]) -> dict[int, Span] | None:
        """The spans of these turns, by one more rendering; None if the rendering does not prove the spans."""
        if any("reasoning_content" in self.messages[index] for index in turns):
            return None
        sentinels: list[_Sentinel] = []
        changed = {}
        for index in turns:
            message, count = self.messages[index], len(sentinels)
            if "tool_calls" in message:
                calls = message["tool_calls"]
                marked = [renamed(call, self._sentinel(number)) for number, call in enumerate(calls, count)]
                changed[index] = {**message, "tool_calls": marked}
                values = [call["function"]["name"] for call in calls]
            else:
                changed[index] = {**message, "content": self._sentinel(count)}
                values = [message["content"]]
            last = len(values) - 1
            sentinels += [
                _Sentinel(value, index, at == 0, at == last, "tool_calls" not in message)
                for at, value in enumerate(values)
            ]
        try:
            rendered = self._render(changed)
        except RowError:
            return None  # the template tests contents; a rendering for each turn may still succeed
        parts = re.split(self._sentinel("([0-9]+)"), rendered)
        numbers, pieces = [int(number) for number in parts[1::2]], parts[::2]
        if list(dict.fromkeys(numbers)) != list(range(len(sentinels))):
            return None
        for as_written in (str, str.strip):
            written = [as_written(sentinels[number].value) for number in numbers]
            spelled = (content + piece for content, piece in zip(written, pieces[1:], strict=True))
            if self.text == pieces[0] + "".join(spelled):
                break
        else:
            return None
        spans: dict[int, Span] = {}
        seen = position = start = 0
        for number, piece, value, behind in zip(numbers, pieces, written, pieces[1:], strict=False):
            sentinel = sentinels[number]
            position += len(piece)
            if number < seen:
                if sentinel.is_content:
                    return None  # a content that is written twice
                position += len(value)
                continue
            seen += 1
            if sentinel.is_first:
                lead = self._lead_length(piece, sentinel.turn)
                if lead is None:
                    return None
                start = position - lead
            position += len(value)
            if sentinel.is_last and sentinel.is_content:
                spans[sentinel.turn] = start, self._turn_end(position)
            elif sentinel.is_last:
                arguments = self.messages[sentinel.turn]["tool_calls"][-1]["function"].get("arguments")
                head, tail = self.template.around_arguments
                call = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
                if not tail or not behind.startswith(head + call + tail):  # the end of the call is not certain
                    return None
                spans[sentinel.turn] = start, position + len(head + call + tail)
        return spans

    def span_of_turn(self, index: int) -> Span:
        """The span of one turn by a separate rendering."""
        content, reasoning = self._sentinel(0), self._sentinel(1)
        changed = {**self.messages[index], "content": content}
        if "reasoning_content" in changed:
            changed["reasoning_content"] = changed["thinking"] = reasoning
        rendered = self._render({index: changed})
        if (times := rendered.count(content)) != 1:
            raise RowError(f"the chat template writes the content of messages[{index}] {times} times; {ADVICE}")
        before, _, after = rendered.partition(content)
        end = len(self.text) - len(after)
        if not self.text.endswith(after):
            raise RowError(f"the content of messages[{index}] changes what the chat template writes later; {ADVICE}")
        start = self._turn_start(index, before, before.partition(reasoning)[0])
        if start is None or start > end:
            raise RowError(f"the content of messages[{index}] changes what the chat template writes before; {ADVICE}")
        return start, self._turn_end(end)

    def span_of_calls(self, index: int) -> Span:
        """The span of a turn with tool calls, by separate renderings. The first sentinel in the turn shows its start,
        and a rendering that stops after this turn shows its end."""
        message = self.messages[index]
        calls, opening = message["tool_calls"], self._brackets[0]
        last = self._sentinel(len(calls) - 1)
        marked = {**message, "tool_calls": [renamed(call, self._sentinel(at)) for at, call in enumerate(calls)]}
        marked |= {
            key: self._sentinel(key) for key in ("content", "reasoning_content", "thinking") if message.get(key)
        }
        rendered = self._render({index: marked})
        if last not in rendered:
            raise RowError(f"the chat template does not write tool_calls[{len(calls) - 1}] of messages[{index}]")
        before = rendered[: rendered.index(opening)]
        start = self._turn_start(index, before, before, marked)
        changed = {index: {**message, "tool_calls": [*calls[:-1], renamed(calls[-1], last)]}}
        name = calls[-1]["function"]["name"]
        after = self._render(changed).partition(last)[2].replace(last, name)
        turn = after
        if index + 1 < len(self.messages):
            stopped = self._render(changed, index + 1).partition(last)[2].replace(last, name)
            turn = os.path.commonprefix([after, stopped])  # noqa: RUF071 - of characters
            if turn != stopped:  # a turn ends differently at the end of the conversation
                endings = self.template.ending.finditer(after)
                found = next((ending for ending in endings if ending.end() > len(turn)), None)
                turn = after[: found.end()] if found is not None and found.start() <= len(turn) else ""
        if start is None or not turn or not self.text.endswith(after):
            raise RowError(
                f"the tool calls of messages[{index}] cannot be found in the chat template's text; {ADVICE}"
            )
        return start, len(self.text) - len(after) + len(turn.rstrip())

    def _turn_start(self, index: int, before: str, constant: str, marked: dict[str, Any] | None = None) -> int | None:
        """The position in the text at which the generation prompt of a turn ends; None if it is not certain.

        `before`: a rendering with sentinels, up to the content's sentinel. `constant`: the same rendering up to the
        reasoning's sentinel. `marked`: the turn with sentinels, if it calls tools.
        """
        lead = self._lead_length(before, index)
        if lead is not None and self.text.startswith(before[: len(before) - lead]):
            return len(before) - lead
        found = self._start_by_the_turn_before(index, before, marked) if marked is not None and index else None
        if found is not None:
            return found
        # The generation prompt may depend on the conversation, so it is rendered. The rendering counts only if it has
        # the message before the turn. Some templates write nothing until the assistant has spoken, and then everything
        # would be supervised.
        sentinel = "".join(self._brackets)
        try:
            prompt = self._render({}, index, prompt=True)
            earlier = {index - 1: {**self.messages[index - 1], "content": sentinel}} if index else {}
            with_sentinel = self._render(earlier, index, prompt=True)
        except RowError:
            prompt = with_sentinel = ""
        if prompt and self.text.startswith(prompt) and (not index or sentinel in with_sentinel):
            return len(prompt)
        if self.frame.prompt and self._is_same_for_a_user(index, before):
            return None
        return len(constant) if self.text.startswith(constant) else None

    def _start_by_the_turn_before(self, index: int, before: str, marked: dict[str, Any]) -> int | None:
        """The start of a turn with calls, shown by the text between the turn and the content of the message before it;
        None if it is not certain."""
        opening, closing = self._brackets
        sentinel = closing + closing
        earlier = {index - 1: {**self.messages[index - 1], "content": sentinel}}
        try:
            prompt = self._render(earlier, index, prompt=True).rpartition(sentinel)
            rest = self._render(earlier | {index: marked}).rpartition(sentinel)[2]
        except RowError:
            return None
        between = rest[: rest.index(opening)] if opening in rest else ""
        start = len(before) - len(between) + len(prompt[2])
        if prompt[1] and between.startswith(prompt[2]) and self.text.startswith(before[:start]):
            return start
        return None

    def _is_same_for_a_user(self, index: int, before: str) -> bool:
        """Whether the text before a turn would be the same for a user's turn. (Llama-3.1 writes its tools and the
        first message, of whatever role, into one user turn.)"""
        content = self._sentinel(0)
        try:
            rendered = self._render({index: {"role": "user", "content": content}})
        except RowError:
            return False
        return rendered.partition(content)[0] == before
