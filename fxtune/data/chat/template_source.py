"""Where a chat template comes from (the tokenizer or data.chat_template), its variables, and the time it writes."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from fxtune.data.chat.rewriting import Rewriting
from fxtune.data.chat.special_tokens import SpecialTokenEscaper
from fxtune.data.chat.template import RESERVED, ChatTemplate, undeclared_variables, unused_characters
from fxtune.data.config import template_time_now
from fxtune.data.formats.chat_format import VARIABLES
from fxtune.data.formats.values import RowError
from fxtune.data.read.files import require_file
from fxtune.errors import DataError, did_you_mean, shortened

MAX_TEMPLATE_BYTES = 1 << 20
"""Size limit of a chat template file. Long published templates have 30,000 bytes."""
CLOCK = "strftime_now"
"""The function by which a template asks for the time."""
NOWHERE = "\0"
"""A text that no row has."""
MAX_TEMPLATES = 100
"""Rows may give about this many different sets of template variables."""
_TIME_CALL = re.compile(CLOCK + r"\s*\(\s*(['\"])(.*?)\1\s*\)")
_NO_TIME_CALL = re.compile(CLOCK + r"\s+is\s+(?:not\s+)?defined|\{#.*?#\}", re.DOTALL)


def read_template(path: str) -> str:
    """The Jinja text of `data.chat_template`. Raises DataError if the file cannot be read."""
    try:
        file = Path(os.path.expanduser(path))
        require_file(file)
        if (size := file.stat().st_size) > MAX_TEMPLATE_BYTES:
            raise DataError(
                f"data.chat_template={path}: {size:,} bytes are too long for a chat template (limit "
                f"{MAX_TEMPLATE_BYTES:,})"
            )
        source = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataError(f"data.chat_template={path}: there is no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"data.chat_template={path} cannot be read as a text file: {error}") from None
    if not source.strip():
        raise DataError(f"data.chat_template={path}: the file is empty")
    return source


def template_of_pairs(tokenizer: Any, path: str | None) -> str | None:
    """The chat template that writes messages of the roles `query` and `document`, as rerankers have it: the file
    `path` (data.chat_template), or the template of `tokenizer`. None if the tokenizer has no such template. Raises
    DataError if the file has none."""
    source = read_template(path) if path else str(tokenizer.chat_template or "")
    if all(re.search(rf"""['"]{role}['"]""", source) for role in ("query", "document")):
        return source
    if path:
        raise DataError(f"data.chat_template={path}: it does not name the roles `query` and `document`. Add them.")
    return None


def write_pair(tokenizer: Any, system: str | None, query: str, candidate: str) -> tuple[str, int, int]:
    """(a query and a candidate in the chat template of `tokenizer`; where the candidate begins in this text, and where
    it ends, in characters). Raises RowError if the template leaves out a text."""

    def write(text: str) -> str:
        turns = {"system": system, "query": query, "document": text}
        messages = [{"role": role, "content": content} for role, content in turns.items() if content is not None]
        return str(tokenizer.apply_chat_template(messages, tokenize=False))

    whole, (before, found, after) = write(candidate), write(NOWHERE).rpartition(NOWHERE)
    if not found or query.strip() not in before + after:
        raise RowError("the chat template leaves out the text of the role `query` or `document`")
    return whole, len(before), len(whole) - len(after)


class ChatTemplates:
    """The chat templates of an encoder. Each set of variables that rows give has a template for rows with tools and a
    template for rows without tools. Picklable.

    Args:
        tokenizer: has the chat template, unless `path` names another one.
        path: data.chat_template, a file.
        variables: variables of the template for all rows.
        time: the date and time that templates write, in ISO 8601; None: the present time.
        system: data.system; if it is set, the template must write system messages.
    """

    def __init__(
        self, tokenizer: Any, path: str | None, variables: Mapping[str, Any], time: str | None, system: str | None
    ) -> None:
        self._tokenizer, self._variables, self._has_system = tokenizer, variables, system is not None
        self.source = read_template(path) if path else None
        self._time = datetime.fromisoformat(time or template_time_now())
        self._made: dict[tuple[bool, str], tuple[ChatTemplate, SpecialTokenEscaper, Rewriting]] = {}

    @property
    def are_used(self) -> bool:
        return bool(self._made)

    def get(
        self, with_tools: bool, variables: Mapping[str, Any] | None = None
    ) -> tuple[ChatTemplate, SpecialTokenEscaper, Rewriting]:
        """The template, and the escaper and the rewriting that belong to it. `variables`: template variables of a row.
        Raises RowError if these cannot be used, and DataError if the template cannot be used."""
        used = {**self._variables, **(variables or {})}
        key = with_tools, json.dumps(used, sort_keys=True, default=str)
        if key not in self._made:
            if len(self._made) > MAX_TEMPLATES:
                raise RowError(
                    f"{VARIABLES} has another value in each row. A template is measured once for each, so at most "
                    f"{MAX_TEMPLATES} are used: write what differs from row to row into the messages"
                )
            try:
                self.require_variables(variables or {})
            except DataError as error:
                raise RowError(str(error).removeprefix("data.")) from None
            tokenizer = self._tokenizer
            special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
            ends = sorted(special | {tokenizer.eos_token or ""})
            source = with_time(self._source(with_tools), self._time)
            template = ChatTemplate(source, {**tokenizer.special_tokens_map, **used}, ends)
            if self._has_system:
                require_system(template)
            escaper = SpecialTokenEscaper(tokenizer, template.frame.prompt)
            self._made[key] = template, escaper, Rewriting(template)
        return self._made[key]

    def _source(self, with_tools: bool) -> str:
        tokenizer = self._tokenizer
        if self.source is not None:
            return self.source
        if not tokenizer.chat_template:
            raise DataError(
                f"the tokenizer of {tokenizer.name_or_path or 'this model'} has no chat template and the rows are "
                "chats; set data.chat_template=FILE to a Jinja template"
            )
        try:
            # Some models have several named templates; tools select "tool_use", as in apply_chat_template.
            return str(tokenizer.get_chat_template(None, [{}] if with_tools else None))
        except ValueError as error:
            raise DataError(
                f"the tokenizer's chat templates cannot be used: {error}; set data.chat_template=FILE"
            ) from None

    def require_variables(self, variables: Mapping[str, Any]) -> None:
        """Raise DataError for a variable that the chat template does not read."""
        if not variables:
            return
        known = {name for source in self._sources() for name in undeclared_variables(source)} - RESERVED
        for name in variables:
            if name in RESERVED:
                raise DataError(f"data.{VARIABLES}.{name}: fxtune sets this variable of the chat template itself")
            if name not in known:
                raise DataError(
                    f"data.{VARIABLES}.{shortened(name)}: the chat template reads no such variable"
                    f"{did_you_mean(name, known)}"
                )

    def written_times(self) -> list[str]:
        """The dates and times that the chat template writes by calls of strftime_now."""
        calls = [call for source in self._sources() for call in _TIME_CALL.finditer(source)]
        return sorted({self._time.strftime(call[2]) for call in calls})

    def remarks_on_ends(self) -> list[str]:
        """Lines about a template in which turns have no end."""
        template, *_ = self.get(with_tools=False)
        found = []
        if template.next_header:
            found.append(
                "the chat template ends no turn, and models stop at the first token of the next one, so "
                f"{template.next_header} is learned as the end of an answer"
            )
        if not template.frame.endings:
            found.append(
                "the chat template writes no end-of-turn token after the assistant's answer, so the model does not "
                "learn where to stop; add one in a template of your own (data.chat_template=FILE)"
            )
        return found

    def _sources(self) -> list[str]:
        """The Jinja texts of the template. A tokenizer may have none, one, or several with names."""
        own = self._tokenizer.chat_template
        if self.source or not own:
            return [self.source] if self.source else []
        return list(own.values()) if isinstance(own, dict) else [own]


def with_time(source: str, time: datetime) -> str:
    """`source` with `time` as text in place of each call of strftime_now. The present time would differ from row to
    row, and after a resume. transformers cannot pass another clock to a template, so the calls are replaced. Raises
    DataError for a call without a literal format."""
    if CLOCK in _NO_TIME_CALL.sub("", _TIME_CALL.sub("", source)):
        raise DataError(
            f"the chat template calls {CLOCK} with a format that is no string in the call, so the time of a run "
            "cannot be written into it; write the format there in a template of your own (data.chat_template=FILE)"
        )
    return _TIME_CALL.sub(lambda call: json.dumps(time.strftime(call[2])), source)


def require_system(template: ChatTemplate) -> None:
    """Raise DataError if the chat template does not write the system message of data.system."""
    mark = "".join(unused_characters(template.source))
    roles = {"system": mark, "user": "question", "assistant": "answer"}
    try:
        text, _ = template.render([{"role": role, "content": content} for role, content in roles.items()])
        reason = "the chat template does not write system messages"
    except RowError as refusal:
        text, reason = "", str(refusal)
    if mark not in text:
        raise DataError(
            f"data.system: {reason}. Leave data.system out, or set data.chat_template to a template that writes it."
        )
