"""One answer with a judgment. The answer ends a chat, or is `completion` beside a `prompt`. The judgment is `label` or
`kto_tag`: true or false, 1 or 0."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from fxtune.data.formats.alpaca import AlpacaFormat
from fxtune.data.formats.chat_format import ChatFormat, with_parsed_lists
from fxtune.data.formats.messages import MessagesFormat, ShareGPTFormat
from fxtune.data.formats.pair_format import complete_answer
from fxtune.data.formats.preferences import after_last_question
from fxtune.data.formats.prompt_completion import PromptCompletionFormat
from fxtune.data.formats.row_format import Content, LearnConfig, PlainText, Preference, RowFormat
from fxtune.data.formats.values import RowError, short

JUDGMENTS = ("label", "kto_tag")
JUDGED: tuple[ChatFormat, ...] = (MessagesFormat(), ShareGPTFormat(), PromptCompletionFormat(), AlpacaFormat())
"""The formats that the columns beside the judgment may have."""


class KTOFormat(RowFormat):
    """The answer is the completion, or all turns after the last question. A good answer has label 1, a bad one 0."""

    name = "kto"
    columns = ("prompt", "completion", "label")
    known_columns = frozenset(JUDGMENTS).union(*(format.known_columns for format in JUDGED))
    is_group = True
    is_question = False
    answers = ("answer",)
    nothing_learned = "each answer is switched off by its `train` or `weight`, or by data.learn"

    def fits(self, row: Mapping[str, Any]) -> bool:
        return any(_judgment(row.get(name)) is not None for name in JUDGMENTS) and _judged(row) is not None

    def read(self, row: Mapping[str, Any], learn: LearnConfig, unused: Collection[str] = ()) -> Content:
        judgment = next((name for name in JUDGMENTS if row.get(name) is not None and name not in unused), None)
        if judgment is None:
            raise RowError("there is no judgment: expected the key 'label' or 'kto_tag'")
        is_good = _judgment(row[judgment])
        if is_good is None:
            raise RowError(f"{judgment} is {short(row[judgment])}, not true or false, 1 or 0")
        format = _judged(row)
        if format is None:
            raise RowError("there is no chat beside the judgment: expected messages, or prompt and completion")
        label = [float(is_good)]
        if isinstance(format, PromptCompletionFormat) and all(isinstance(row[name], str) for name in format.columns):
            text = format.read(row, learn, unused)
            assert isinstance(text, PlainText)
            return Preference([text], [row], label)
        row = with_parsed_lists(row)
        used = {key: value for key, value in row.items() if key not in unused}
        chat = format.turns(used)
        chat.row = row
        if not isinstance(format, PromptCompletionFormat):
            start = after_last_question(chat)
            chat.train_flags[:start] = [False] * start
        complete_answer("the answer", chat, used, learn)
        return Preference([chat], [row], label)


def _judgment(value: Any) -> bool | None:
    """Whether a judgment says that the answer is good; None if `value` is no judgment. Numbers and texts, as in CSV
    files, may be judgments, too."""
    if isinstance(value, str):
        value = {"true": True, "false": False, "1": True, "0": False}.get(value.strip().lower())
    return bool(value) if isinstance(value, (bool, int, float)) and value in (0, 1) else None


def _judged(row: Mapping[str, Any]) -> ChatFormat | None:
    return next((format for format in JUDGED if format.fits(row)), None)
