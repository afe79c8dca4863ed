"""Renders messages with a chat template, and measures on probes the text that the template writes around messages.

Templates run only in transformers' immutable Jinja sandbox, with limits on time and memory. turns.py finds the
characters that the model learns, and rewriting.py the answers that the template changes when other turns follow.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

from fxtune.data.chat.calls import CallStyle, calling, with_call_style
from fxtune.data.formats.image_parts import IMAGE
from fxtune.data.formats.row_format import BEGUN, OPEN
from fxtune.data.formats.values import RowError
from fxtune.errors import DataError
from fxtune.system.process.resource_limits import LimitExceeded, limit_resources

Messages = Sequence[dict[str, Any]]
Tools = list[dict[str, Any]] | None
Span = tuple[int, int]

RESERVED = frozenset(
    ("messages", "conversations", "tools", "chat_template", "add_generation_prompt", "continue_final_message")
)
"""Variables of a template that fxtune sets."""
_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_MARKS = re.compile(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}")


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
    """The number of characters after the content that a generation mark includes; None: marks cannot be used."""
    marked_prompt: str = ""
    """The part of the generation prompt that a generation mark includes, such as an empty block of reasoning."""


class ChatTemplate:
    """A chat template with its variables.

    Args:
        source: the Jinja text.
        variables: bos_token, eos_token and others that `apply_chat_template` passes, and the user's variables.
        special_tokens: the tokenizer's special tokens, to recognize the end of a turn.

    Raises:
        DataError: the template does not compile, or tries to leave the sandbox.
    """

    def __init__(self, source: str, variables: dict[str, Any], special_tokens: Sequence[str]) -> None:
        self.source = source
        self.variables = variables
        alternatives = "|".join(re.escape(token) for token in sorted(special_tokens, key=len, reverse=True) if token)
        self._special = re.compile(alternatives or "(?!)")
        self.ending = re.compile(rf"\s*(?:{self._special.pattern})")
        self._takes_parts_only, self._unasked_prompt, self._between = False, "", ""
        self.next_header = self._header_behind_calls = ""
        self._takes_parts_only = self._writes_parts_only()
        self._measure_last_end()
        self.has_marks = bool(_MARK.search(source))
        frame = self._measure_frame()
        if frame is not None and frame.overrun is None:
            # transformers misplaces marks inside a macro or a {% set %} block, and some templates mark only the last
            # turn. If marks miss the content of the probe, they are trusted for no row.
            self.has_marks = False
        self.frame = frame or TurnFrame()

    def render(
        self, messages: Messages, tools: Tools = None, *, prompt: bool = False, marks: bool = False
    ) -> tuple[str, list[Span]]:
        """The text and, with `marks`, the spans of its generation marks. `prompt`: append the generation prompt.

        Raises:
            RowError: the template refuses these messages (the error quotes the template) or fails on them.
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
            raise  # in a thread limit_resources() limits nothing, so the machine has no memory left
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
        """Whether the template writes only contents that are lists of parts, and no texts (SmolVLM's template)."""
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
        """The messages with roles that this template knows, and with tool calls in the form that the template takes.
        Raises RowError if there are calls and the template writes none."""
        if any(message["role"] == "developer" for message in messages) and not self._knows_developer:
            messages = [
                message | {"role": "system"} if message["role"] == "developer" else message for message in messages
            ]
        calling = next((index for index, message in enumerate(messages) if "tool_calls" in message), None)
        if calling is None:
            return messages
        if not self.call_style.is_written:
            raise RowError(
                f"the chat template writes no tool calls, as messages[{calling}] has; name one that does in "
                "data.chat_template=FILE"
            )
        return with_call_style(messages, self.call_style)

    @cached_property
    def around_arguments(self) -> tuple[str, str]:
        """(the text between a call's name and its arguments, the text from the arguments to the turn's end); empty
        texts if they vary."""
        opening, closing = unused_characters(self.source)
        name, arguments = f"{opening}?{closing}", {"a": opening}
        user = {"role": "user", "content": "?"}
        chat = [user, calling(name, arguments)]
        try:
            texts = [
                self.render(with_call_style(messages, self.call_style))[0].rpartition(name)[2]
                for messages in (chat, [*chat, user])
            ]
        except RowError:
            return "", ""
        head, _, tail = texts[0].partition(json.dumps(arguments, ensure_ascii=False))
        same = texts[1].startswith(texts[0].rstrip()) and tail.strip()
        return (head, tail.rstrip()) if same else ("", "")

    @cached_property
    def _knows_developer(self) -> bool:
        """Whether the template treats the role developer differently from a made-up role. Many templates copy the name
        of any role into the text."""
        texts = []
        for role in ("developer", "unheardof"):
            try:
                text, _ = self.render([{"role": role, "content": "Rule."}, {"role": "user", "content": "Question?"}])
            except RowError:
                text = ""
            texts.append(text.lower())
        return "rule." in texts[0] and texts[0] != texts[1].replace("unheardof", "developer")

    @cached_property
    def call_style(self) -> CallStyle:
        """The first form of calls in which this template writes name and arguments. Python's repr does not count."""
        opening, closing = unused_characters(self.source)
        name, key, value = (f"{opening}{number}{closing}" for number in range(3))
        chat = [{"role": "user", "content": "?"}, calling(name, {key: value})]
        contents: tuple[tuple[str | None, ...], ...] = ((), (None,), ("",))
        for short_ids, as_text, content in product((False, True), (False, True), contents):
            style = CallStyle(True, as_text, content, short_ids)
            try:
                text, _ = self.render(with_call_style(chat, style))
            except RowError:
                continue
            if all(part in text for part in (name, key, value)) and f"'{key}'" not in text:
                return style
        return CallStyle(is_written=False)

    @cached_property
    def leads_of_calls(self) -> tuple[str, ...]:
        """For turns with calls: possible texts between the generation prompt and the reasoning, the content or the
        function's name, longest first."""
        opening, closing = unused_characters(self.source)
        question, sentinel = f"{opening}?{closing}", f"{opening}!{closing}"
        rest = [
            {"role": "tool", "content": "r"},
            {"role": "assistant", "content": "a"},
            {"role": "user", "content": "u"},
        ]
        leads = set()
        for extra in ({}, {"content": sentinel}, {"reasoning_content": sentinel, "thinking": sentinel}):
            turn = calling(sentinel, {"a": "b"}) | extra
            for later in ([], rest):
                chat = with_call_style([{"role": "user", "content": question}, turn, *later], self.call_style)
                try:
                    between = self.render(chat)[0].rpartition(question)[2].partition(sentinel)
                except RowError:
                    continue
                _, prompt, lead = between[0].partition(self.frame.prompt or opening)
                if prompt and between[1]:
                    leads.add(lead)
        return _longest_first(leads)

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
        # A turn may end differently at the end of the conversation and before another turn (gpt-oss). The ending
        # before another turn is measured before a generation prompt, because another role's header could be mistaken
        # for an ending. If the ending of the conversation is longer (Phi-3's end of the text), it is not used.
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
        """The end of a turn in `tail`, the text after a content: up to the last special token, because a turn may end
        with several. Without a special token all of `tail` (an end of turn in plain letters)."""
        ends = [found.end() for found in self._special.finditer(tail)]
        return tail[: ends[-1]] if ends else tail.rstrip()

    def _measure_last_end(self) -> None:
        """Measure the text between an answer and the next question (`_between`), and texts that render() corrects.

        Command R7B's template always writes the generation prompt (`_unasked_prompt`). render() removes this prompt.
        Models of GLM stop at the first token of the next turn, `<|user|>`, or `<|observation|>` after calls. render()
        adds this token after the last turn (`next_header`, `_header_behind_calls`; empty if turns have an end).
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
            at = common.rfind(openers[0])  # each header begins with the first special token of the text
            if at >= 0 and self._special.search(tail, 0, len(tail) - len(common) + at):
                self._unasked_prompt = common[at:]
        header = self.ending.match(self._between)
        if header and not tail.strip() and header[0].strip() != begin and header[0].startswith(tail):
            self.next_header = header[0][len(tail) :]
            turns = [user, calling(answer, {"a": "b"}), {"role": "tool", "content": "r"}]
            with suppress(RowError):
                ended, followed = (self.render(with_call_style(turns[:count], self.call_style))[0] for count in (2, 3))
                found = self.ending.match(followed, len(ended)) if followed.startswith(ended) else None
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


def _with_parts(message: dict[str, Any], always: bool) -> dict[str, Any]:
    """A message in the form that templates take. Its content becomes a list of parts if it has images, or `always`."""
    message = {key: value for key, value in message.items() if key not in (BEGUN, OPEN)}
    content = message.get("content")
    if not isinstance(content, str) or not (always or IMAGE in content):
        return message
    parts: list[dict[str, str]] = []
    for text in re.split(f"({IMAGE})", content):
        parts += [{"type": "image"}] if text == IMAGE else [{"type": "text", "text": text}] if text else []
    return {key: value for key, value in message.items() if key != "images"} | {"content": parts}


def _longest_first(texts: set[str]) -> tuple[str, ...]:
    return tuple(sorted(texts, key=len, reverse=True))


def unused_characters(text: str) -> tuple[str, str]:
    """Two private-use characters that do not occur in `text`. No template trims, splits or changes them."""
    free = (chr(code) for code in range(0xF8000, 0x10FFFE) if chr(code) not in text and code & 0xFFFE != 0xFFFE)
    return next(free), next(free)
