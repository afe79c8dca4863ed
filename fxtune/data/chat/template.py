"""A chat template, and which characters of the rendered text the model learns.

A template turns messages into one text, and the loss mask needs the character span of every assistant turn in it.
Searching the text for the content does not work: templates trim it, remove the reasoning of earlier turns, and users
quote it. Two methods are exact:

(a) `{% generation %}` marks: the template marks the spans itself, and transformers returns them.

(b) Sentinels, for templates without marks (the published ones of Llama-3.1, Qwen3 and Gemma-3): render once more with
private-use characters in place of the assistant's contents. What surrounds them is written by the template, and the
rest of the real text is the contents:

    all turns at once   If the pieces between the sentinels, joined with the contents as given (or stripped, as
                        `| trim` leaves them), spell the real text, the positions are proven. This is the usual case.
    turn by turn        Otherwise, one rendering for each turn. The real text must end with the text after the
                        sentinel: there the content ends, whatever the template did to it (reasoning removed, JSON
                        escaped).

A supervised span starts where the generation prompt ends, because from there on the model writes. So an empty
`<think></think>` that the template puts before the content is learned, and so is the header of a turn if the template
has no generation prompt. A span ends after the end-of-turn token, before the newline behind it. A probe of two
messages measures once for each template what the generation prompt, the text between it and the content, and the end
of a turn are (`TurnFrame`). If a template cannot be read in these ways, the row is a bad row; nothing is guessed.

Cost: one rendering per conversation for (a), two for (b). Templates run only in transformers' immutable Jinja sandbox,
with limits on time and memory (system/resource_limits.py).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fxtune.data.chat.normalize import RowError
from fxtune.errors import DataError
from fxtune.system.resource_limits import LimitExceeded, limit_resources

Messages = Sequence[dict[str, Any]]
Tools = list[dict[str, Any]] | None
Span = tuple[int, int]

_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
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


class ChatTemplate:
    """Jinja source and its variables.

    Args:
        source: the Jinja text.
        variables: bos_token, eos_token and the like, as `apply_chat_template` passes them.
        special_tokens: the tokenizer's special tokens, to recognize the end of a turn.

    Raises:
        DataError: the template does not compile, or tries to leave the sandbox.
    """

    def __init__(self, source: str, variables: dict[str, Any], special_tokens: Sequence[str]) -> None:
        self.source = source
        self.variables = variables
        alternatives = "|".join(re.escape(token) for token in sorted(special_tokens, key=len, reverse=True) if token)
        self._ending = re.compile(rf"\s*(?:{alternatives or '(?!)'})")
        self.has_marks = bool(_MARK.search(source))
        frame = self._measure_frame()
        if frame is not None and frame.overrun is None:
            # transformers misplaces marks inside a macro or a {% set %} block, and some templates mark only the last
            # turn: marks that miss the probe's content cannot be trusted on any row.
            self.has_marks = False
        self.frame = frame or TurnFrame()

    def render(
        self, messages: Messages, tools: Tools = None, *, prompt: bool = False, marks: bool = False
    ) -> tuple[str, list[Span]]:
        """The text and, with `marks`, the spans of its generation marks. `prompt`: append the generation prompt.

        Raises:
            RowError: the template refuses these messages (the message quotes it) or fails on them.
            DataError: no row can be rendered: the syntax is wrong, the template tries to leave the sandbox, or it
                needs more time or memory than any rendering can need.
        """
        from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            with limit_resources():
                rendered: Any = render_jinja_template(
                    conversations=[list(messages)],
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
            raise  # the limit around all rows handles it
        except TemplateSyntaxError as error:
            raise DataError(
                f"the chat template does not compile: line {error.lineno}: {error.message}. Correct it, or name "
                "another in data.chat_template"
            ) from None
        except SecurityError as error:
            raise DataError(f"the chat template tries to leave its sandbox and is refused: {error}") from None
        except TemplateError as error:
            raise RowError(f"the chat template refuses this conversation: {error}") from None
        except Exception as error:  # noqa: BLE001 - a template is foreign code and can raise anything
            raise RowError(f"the chat template fails on this conversation: {type(error).__name__}: {error}") from None
        texts, spans = rendered
        return texts[0], spans[0] if marks else []

    def supervised_spans(
        self, messages: Messages, supervised: Sequence[bool], tools: Tools = None
    ) -> tuple[str, list[Span]]:
        """Render, and find the spans that the model learns.

        Args:
            messages, tools: as `normalize.read_conversation` returns them.
            supervised: for each message, True if it is an assistant turn with content that the model learns.

        Returns:
            The text, and the ascending, disjoint (start, end) character spans, one for each True in `supervised`.

        Raises:
            RowError: the template refuses the conversation, or its turns cannot be located with certainty.
        """
        text, marks = self.render(messages, tools, marks=self.has_marks)
        assistants = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if self.has_marks and len(marks) == len(assistants):
            return text, [
                self._span_of_mark(text, *mark)
                for index, mark in zip(assistants, marks, strict=True)
                if supervised[index]
            ]
        turns = [index for index in assistants if supervised[index]]
        if not turns:
            return text, []
        spans = self._spans_at_once(text, messages, turns, tools)
        if spans is None:
            spans = [self._span_of_turn(text, messages, index, tools) for index in turns]
        for (_, end), (start, _), index in zip(spans, spans[1:], turns[1:], strict=False):
            if start < end:
                raise RowError(f"the chat template writes messages[{index}] inside an earlier turn; {_ADVICE}")
        return text, spans

    def _span_of_mark(self, text: str, start: int, end: int) -> Span:
        """The span of a generation mark, but ended after the end-of-turn token: marks may end before it, or after the
        newline behind it. If no such token is found, the mark's own end stays."""
        content_end = end - (self.frame.overrun or 0)
        turn_end = self._turn_end(text, content_end)
        return (start, turn_end) if turn_end > content_end >= start else (start, end)

    def _turn_end(self, text: str, content_end: int) -> int:
        for ending in self.frame.endings:
            if text.startswith(ending, content_end):
                return content_end + len(ending)
        return content_end

    def _lead_length(self, before: str) -> int | None:
        """How many characters at the end of `before`, the text up to a content, the model writes itself."""
        for lead in self.frame.leads:
            if before.endswith(self.frame.prompt + lead):
                return len(lead)
        return None

    def _spans_at_once(self, text: str, messages: Messages, turns: list[int], tools: Tools) -> list[Span] | None:
        """The spans of all turns by one more rendering; None if it proves nothing."""
        if any("reasoning_content" in messages[index] for index in turns):
            return None
        opening, closing = unused_characters(text)
        variant = list(messages)
        for number, index in enumerate(turns):
            variant[index] = {**messages[index], "content": f"{opening}{number}{closing}"}
        try:
            rendered, _ = self.render(variant, tools)
        except RowError:
            return None  # the template reads the content; turn by turn it may still pass
        parts = re.split(f"{opening}([0-9]+){closing}", rendered)
        if parts[1::2] != [str(number) for number in range(len(turns))]:
            return None
        pieces = parts[::2]
        for as_written in (str, str.strip):
            contents = [as_written(messages[index]["content"]) for index in turns]
            if text == pieces[0] + "".join(c + piece for c, piece in zip(contents, pieces[1:], strict=True)):
                break
        else:
            return None
        spans, position = [], 0
        for piece, content in zip(pieces, contents, strict=False):
            lead = self._lead_length(piece)
            if lead is None:
                return None
            position += len(piece)
            spans.append((position - lead, self._turn_end(text, position + len(content))))
            position += len(content)
        return spans

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

    def _turn_start(
        self, text: str, before: str, constant: str, messages: Messages, index: int, tools: Tools
    ) -> int | None:
        """Where in `text` the generation prompt of a turn ends.

        `before` is the text up to the sentinel content in a rendering with sentinels, `constant` the part of it
        before the sentinel reasoning.
        """
        lead = self._lead_length(before)
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
        tails = [after]
        behind = continued.partition(answer)[2]
        if prompt and behind.endswith(prompt):
            tails.append(behind[: len(behind) - len(prompt)])
        endings = {self._first_ending(tail) for tail in tails} - {""}
        overrun = None
        if len(marks) == 1:
            start, end = marks[0]
            content_end = len(before) + len(answer)
            if start <= len(before) and content_end <= end <= len(text):
                overrun = end - content_end
        return TurnFrame(prompt, _longest_first(leads), _longest_first(endings), overrun)

    def _first_ending(self, tail: str) -> str:
        """Up to the first special token right behind a content; else all of it (an end of turn in plain letters)."""
        match = self._ending.match(tail)
        return match.group() if match else tail.rstrip()


def _replaced(messages: Messages, index: int, message: dict[str, Any]) -> list[dict[str, Any]]:
    return [*messages[:index], message, *messages[index + 1 :]]


def _longest_first(texts: set[str]) -> tuple[str, ...]:
    return tuple(sorted(texts, key=len, reverse=True))


def unused_characters(text: str) -> tuple[str, str]:
    """Two private-use characters that do not occur in `text`. No template trims or splits at
    them, or changes their case."""
    free = (chr(code) for code in range(0xF8000, 0x10FFFE) if chr(code) not in text and code & 0xFFFE != 0xFFFE)
    return next(free), next(free)
