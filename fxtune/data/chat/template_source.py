"""Where a chat template comes from (the tokenizer or data.chat_template), its variables, and the time it writes."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from fxtune.data.chat.template import RESERVED, ChatTemplate, undeclared_variables, unused_characters
from fxtune.data.formats.chat_format import VARIABLES
from fxtune.data.formats.values import RowError
from fxtune.data.read.files import require_file
from fxtune.errors import DataError, did_you_mean, shortened

MAX_TEMPLATE_BYTES = 1 << 20
"""Size limit of a chat template file. Long published templates have 30,000 bytes."""
CLOCK = "strftime_now"
"""The function that tells a template the time."""
_TIME_CALL = re.compile(CLOCK + r"\s*\(\s*(['\"])(.*?)\1\s*\)")
_NO_TIME_CALL = re.compile(CLOCK + r"\s+is\s+(?:not\s+)?defined|\{#.*?#\}", re.DOTALL)


def read_template(path: str) -> str:
    """The Jinja text of `data.chat_template`. Raises DataError if it cannot be read."""
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


def require_variables(variables: Mapping[str, Any], own: Any, replacement: str | None) -> None:
    """Raise DataError for a variable that the chat template does not read. `own`: the tokenizer's templates;
    `replacement`: the one in their place."""
    if not variables:
        return
    known = {name for source in sources(own, replacement) for name in undeclared_variables(source)} - RESERVED
    for name in variables:
        if name in RESERVED:
            raise DataError(f"data.{VARIABLES}.{name}: fxtune sets this variable of the chat template itself")
        if name not in known:
            raise DataError(
                f"data.{VARIABLES}.{shortened(name)}: the chat template reads no such variable"
                f"{did_you_mean(name, known)}"
            )


def make_template(
    tokenizer: Any, source: str | None, with_tools: bool, variables: Mapping[str, Any], time: datetime
) -> ChatTemplate:
    """The chat template of `source`, or of the tokenizer if that is None. Raises DataError if there is none."""
    if source is None:
        if not tokenizer.chat_template:
            raise DataError(
                f"the tokenizer of {tokenizer.name_or_path or 'this model'} has no chat template and the rows are "
                "chats; set data.chat_template=FILE to a Jinja template"
            )
        try:
            # Some models have several named templates; tools select "tool_use", as in apply_chat_template.
            source = tokenizer.get_chat_template(None, [{}] if with_tools else None)
        except ValueError as error:
            raise DataError(
                f"the tokenizer's chat templates cannot be used: {error}; set data.chat_template=FILE"
            ) from None
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    ends = sorted(special | {tokenizer.eos_token or ""})
    return ChatTemplate(with_time(source, time), {**tokenizer.special_tokens_map, **variables}, ends)


def sources(own: Any, replacement: str | None) -> list[str]:
    """The Jinja texts of a chat template: none, one, or several by name. `own`: the tokenizer's; `replacement`: the
    text in its place."""
    if replacement or not own:
        return [replacement] if replacement else []
    return list(own.values()) if isinstance(own, dict) else [own]


def written_times(own: Any, replacement: str | None, time: datetime) -> list[str]:
    """What a chat template writes with strftime_now at `time`. `own`, `replacement`: as in sources()."""
    calls = [call for source in sources(own, replacement) for call in _TIME_CALL.finditer(source)]
    return sorted({time.strftime(call[2]) for call in calls})


def with_time(source: str, time: datetime) -> str:
    """A template that writes `time` where `source` calls strftime_now: the present is another one in each row, and
    after a resume. transformers passes no function to a template, so the texts stand in place of the calls."""
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
