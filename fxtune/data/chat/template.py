"""A chat template, and which characters of what it writes the model is trained on.

A template turns messages into one text; the mask needs the character span of every assistant turn in that text. Searching
the text for the content does not work: templates trim it, drop the thinking of earlier turns, and users quote it. Two
ways are exact.

(a) `{% generation %}` marks: the template says so itself, transformers returns the spans.

(b) Perturbation, for templates without marks (the stock ones of Llama-3.1, Qwen3 and Gemma-3): render once more with the
assistant's contents replaced by characters that occur nowhere else (private-use code points). What surrounds them is what
the template writes itself, so the contents are what is left over when that is taken away from the real text:

    together   one more render, all turns replaced at once. If the pieces between the sentinels, joined with the contents
               as given (or as `| trim` leaves them), spell the real text, the positions are proven. The usual case.
    alone      otherwise one render a turn. The text after the sentinel must end the real text: that is the content's end,
               whatever the template did to the content (thinking stripped, JSON escaped).

A supervised span starts where the generation prompt ends, because from there on the model writes: an empty
`<think></think>` that the template puts before the content is learned, as it is under marks that enclose it; so is the
header of a turn where a template has no generation prompt to write it. It ends after the end-of-turn token, not after
the newline behind that. What the generation prompt, the text between it and the content, and the end of a turn are is
measured once a template by a probe of two messages (`Frame`). A template that cannot be read in these ways makes a row's
reason, never a guess.

Cost: (a) one render a conversation, (b) two. Templates run in transformers' immutable Jinja sandbox only, within
limits of time and memory (fence.py).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fxtune.data.chat.normalize import BadRow
from fxtune.errors import DataError
from fxtune.system.resource_limits import LimitExceeded, limit_resources

Messages = Sequence[dict[str, Any]]
Span = tuple[int, int]

_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_MEND = "put {% generation %} marks around the assistant's turns in a template of your own (data.chat_template=FILE)"


@dataclass(frozen=True)
class Frame:
    """What a template writes around an assistant's content, measured on a probe."""

    prompt: str = ""
    """The generation prompt, such as `<|im_start|>assistant\\n`; empty where the template has none (Mistral)."""
    leads: tuple[str, ...] = ()
    """What may stand between the generation prompt and the content, longest first."""
    endings: tuple[str, ...] = ()
    """What may stand right behind the content, up to and with the end-of-turn token, longest first."""
    overrun: int | None = None
    """How many characters behind the content a generation mark encloses; None: no (usable) marks."""


class ChatTemplate:
    """Jinja source plus the variables it sees.

    Args:
        source: the Jinja text.
        variables: bos_token, eos_token and the like, as `apply_chat_template` passes them.
        special_tokens: the tokenizer's special tokens, to recognise the end of a turn.

    Raises:
        DataError: the template does not compile, or tries to leave the sandbox.
    """

    def __init__(self, source: str, variables: dict[str, Any], special_tokens: Sequence[str]) -> None:
        self.source = source
        self.variables = variables
        alternatives = "|".join(re.escape(token) for token in sorted(special_tokens, key=len, reverse=True) if token)
        self._ending = re.compile(rf"\s*(?:{alternatives or '(?!)'})")
        self.marked = bool(_MARK.search(source))
        frame = self._probe()
        if self.marked and frame is not None and frame.overrun is None:
            # transformers misplaces marks inside a macro or a {% set %} block, and some templates mark the last turn
            # only: marks that miss the probe's content are not to be trusted on any row.
            self.marked = False
        self.frame = frame or Frame()

    def draw(
        self,
        messages: Messages,
        tools: list[dict[str, Any]] | None = None,
        *,
        prompt: bool = False,
        marks: bool = False,
    ) -> tuple[str, list[Span]]:
        """Render. Returns the text and, with `marks`, the spans of its generation marks.

        Raises:
            BadRow: the template refuses these messages (its own words are in the message) or fails on them.
            DataError: no row can be rendered: the template's syntax is wrong, it tries to leave the sandbox, or it takes
                more time or memory than rendering can need.
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
                f"the chat template asks for {limit} to write a conversation of {len(messages)} messages, and is "
                "stopped. Mend it, or name another in data.chat_template"
            ) from None
        except MemoryError:
            raise  # to the fence around all rows
        except TemplateSyntaxError as error:
            raise DataError(
                f"the chat template does not compile: line {error.lineno}: {error.message}. Mend it, or name another "
                "in data.chat_template"
            ) from None
        except SecurityError as error:
            raise DataError(f"the chat template tries to leave its sandbox and is refused: {error}") from None
        except TemplateError as error:
            raise BadRow(f"the chat template refuses this conversation: {error}") from None
        except Exception as error:  # noqa: BLE001 - a template is foreign code: it can raise whatever Python can
            raise BadRow(f"the chat template fails on this conversation: {type(error).__name__}: {error}") from None
        texts, spans = rendered
        return texts[0], spans[0] if marks else []

    def spans(
        self, messages: Messages, learn: Sequence[bool], tools: list[dict[str, Any]] | None = None
    ) -> tuple[str, list[Span]]:
        """Render, and find the spans to supervise.

        Args:
            messages: the conversation, as `conversation.conversation` makes it.
            learn: one a message; True only for assistant turns with content that are to be supervised.
            tools: JSON schemas of the tools offered.

        Returns:
            The text and the ascending, disjoint (start, end) character spans, one for each True in `learn`.

        Raises:
            BadRow: the template refuses the conversation, or its turns cannot be told apart with certainty.
        """
        text, marks = self.draw(messages, tools, marks=self.marked)
        assistants = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if self.marked and len(marks) == len(assistants):
            chosen = zip(assistants, marks, strict=True)
            return text, [self._marked(text, start, end) for index, (start, end) in chosen if learn[index]]
        turns = [index for index in assistants if learn[index]]
        if not turns:
            return text, []
        spans = self._together(text, messages, turns, tools)
        if spans is None:
            spans = [self._alone(text, messages, index, tools) for index in turns]
        for (_, end), (start, _), index in zip(spans, spans[1:], turns[1:], strict=False):
            if start < end:
                raise BadRow(f"the chat template writes messages[{index}] inside an earlier turn; {_MEND}")
        return text, spans

    def _marked(self, text: str, start: int, end: int) -> Span:
        """A mark's span, ended after the end-of-turn token: moved on where the mark stops short of that, moved back
        where the mark also holds the newline behind it. Left as its author set it where no such token is found."""
        if self.frame.overrun is None:
            return start, end
        content_end = end - self.frame.overrun
        turn_end = self._turn_end(text, content_end)
        return (start, turn_end) if turn_end > content_end >= start else (start, end)

    def _turn_end(self, text: str, content_end: int) -> int:
        for ending in self.frame.endings:
            if text.startswith(ending, content_end):
                return content_end + len(ending)
        return content_end

    def _lead(self, before: str) -> int | None:
        """How many characters at the end of `before`, the text up to a content, the model writes itself."""
        for lead in self.frame.leads:
            if before.endswith(self.frame.prompt + lead):
                return len(lead)
        return None

    def _together(
        self, text: str, messages: Messages, turns: list[int], tools: list[dict[str, Any]] | None
    ) -> list[Span] | None:
        """All turns by one more render, or None where that proves nothing."""
        if any("reasoning_content" in messages[index] for index in turns):
            return None
        opening, closing = unused_characters(text)
        variant = list(messages)
        for number, index in enumerate(turns):
            variant[index] = {**messages[index], "content": f"{opening}{number}{closing}"}
        try:
            drawn, _ = self.draw(variant, tools)
        except BadRow:
            return None  # the template looks at the content; a turn on its own may still pass
        parts = re.split(f"{opening}([0-9]+){closing}", drawn)
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
            lead = self._lead(piece)
            if lead is None:
                return None
            position += len(piece)
            spans.append((position - lead, self._turn_end(text, position + len(content))))
            position += len(content)
        return spans

    def _alone(self, text: str, messages: Messages, index: int, tools: list[dict[str, Any]] | None) -> Span:
        """One turn by a render of its own."""
        message = messages[index]
        opening, closing = unused_characters(text)
        content, reasoning = f"{opening}0{closing}", f"{opening}1{closing}"
        changed = {**message, "content": content}
        if "reasoning_content" in message:
            changed["reasoning_content"] = changed["thinking"] = reasoning
        drawn, _ = self.draw([*messages[:index], changed, *messages[index + 1 :]], tools)
        if (times := drawn.count(content)) != 1:
            raise BadRow(f"the chat template writes the content of messages[{index}] {times} times; {_MEND}")
        before, _, after = drawn.partition(content)
        end = len(text) - len(after)
        if not text.endswith(after):
            raise BadRow(f"the content of messages[{index}] changes what the chat template writes later; {_MEND}")
        start = self._start(text, before, before.partition(reasoning)[0], messages, index, tools)
        if start is None or start > end:
            raise BadRow(f"the content of messages[{index}] changes what the chat template writes before; {_MEND}")
        return start, self._turn_end(text, end)

    def _start(
        self, text: str, before: str, constant: str, messages: Messages, index: int, tools: list[dict[str, Any]] | None
    ) -> int | None:
        """Where in `text` the generation prompt of a turn ends.

        `before` is what a render with another content (and reasoning) has up to that content, `constant` its part that
        depends on neither.
        """
        lead = self._lead(before)
        if lead is not None and text.startswith(before[: len(before) - lead]):
            return len(before) - lead
        # A prompt that depends on the conversation: render it. It counts only if it holds the message before, since a
        # template that writes nothing until the assistant has spoken would otherwise make everything supervised.
        opening, closing = unused_characters(text)
        earlier = list(messages[:index])
        try:
            prompt, _ = self.draw(earlier, tools, prompt=True)
            if earlier:
                earlier[-1] = {**earlier[-1], "content": opening + closing}
            witness, _ = self.draw(earlier, tools, prompt=True)
        except BadRow:
            prompt = witness = ""
        if prompt and text.startswith(prompt) and (not earlier or opening + closing in witness):
            return len(prompt)
        if self.frame.prompt and self._anybodys(text, before, messages, index, tools):
            return None
        return len(constant) if text.startswith(constant) else None

    def _anybodys(
        self, text: str, before: str, messages: Messages, index: int, tools: list[dict[str, Any]] | None
    ) -> bool:
        """Whether the text before a turn would be the same if a user spoke: then nobody wrote that the assistant does.
        (Llama-3.1 puts its tools and the first message, whoever's it is, into one turn of the user's.)"""
        opening, closing = unused_characters(text)
        content = f"{opening}0{closing}"
        try:
            drawn, _ = self.draw(
                [*messages[:index], {"role": "user", "content": content}, *messages[index + 1 :]], tools
            )
        except BadRow:
            return False
        return drawn.partition(content)[0] == before

    def _probe(self) -> Frame | None:
        """Measure the frame on a conversation of sentinels. None where the template takes no plain conversation."""
        opening, closing = unused_characters(self.source)
        question, answer, system = (f"{opening}{number}{closing}" for number in range(3))
        asked = [{"role": "user", "content": question}]
        for earlier in (asked, [{"role": "system", "content": system}, *asked]):
            chat = [*earlier, {"role": "assistant", "content": answer}]
            try:
                text, marks = self.draw(chat, marks=self.marked)
                prompted, _ = self.draw(earlier, prompt=True)
                unprompted, _ = self.draw(earlier)
                continued, _ = self.draw(chat, prompt=True)
            except BadRow:
                continue
            if text.count(answer) == 1:
                return self._measure(text, answer, prompted, unprompted, continued, marks)
        return None

    def _measure(
        self, text: str, answer: str, prompted: str, unprompted: str, continued: str, marks: list[Span]
    ) -> Frame:
        before, _, after = text.partition(answer)
        prompt = prompted[len(unprompted) :] if prompted.startswith(unprompted) else ""
        leads = {""} if prompt else set()
        if before.startswith(prompted):
            leads.add(before[len(prompted) :])
        # The end of a turn that is the last, and of one that is not (gpt-oss has two different ones). The second is
        # seen in front of the next generation prompt, where no other role's opening can be mistaken for it.
        tails = [after]
        behind = continued.partition(answer)[2]
        if prompt and behind.endswith(prompt):
            tails.append(behind[: len(behind) - len(prompt)])
        endings = {self._first_ending(tail) for tail in tails} - {""}
        overrun = None
        content_start, content_end = len(before), len(before) + len(answer)
        if len(marks) == 1 and marks[0][0] <= content_start and content_end <= marks[0][1] <= len(text):
            overrun = marks[0][1] - content_end
        return Frame(
            prompt, tuple(sorted(leads, key=len, reverse=True)), tuple(sorted(endings, key=len, reverse=True)), overrun
        )

    def _first_ending(self, tail: str) -> str:
        """Up to the first special token right behind a content; else all of it (an end of turn in plain letters)."""
        match = self._ending.match(tail)
        return match.group() if match else tail.rstrip()


def unused_characters(text: str) -> tuple[str, str]:
    """Two private-use characters that do not occur in `text`. No template trims, cases or splits at these."""
    free = (chr(code) for code in range(0xF8000, 0x10FFFE) if chr(code) not in text and code & 0xFFFE != 0xFFFE)
    return next(free), next(free)
