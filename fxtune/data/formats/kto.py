"""One answer with a judgment: a chat, or `prompt` and `completion`, with `label` or `kto_tag`, true or false."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from fxtune.data.formats.alpaca import AlpacaFormat
from fxtune.data.formats.chat_format import ChatFormat, with_parsed_lists
from fxtune.data.formats.messages import MessagesFormat
from fxtune.data.formats.pair_format import complete_answer
from fxtune.data.formats.preference_messages import after_last_question
from fxtune.data.formats.prompt_completion import PromptCompletionFormat
from fxtune.data.formats.row_format import Content, LearnConfig, PlainText, Preference, RowFormat
from fxtune.data.formats.sharegpt import ShareGPTFormat
from fxtune.data.formats.values import RowError, type_name

JUDGMENTS = ("label", "kto_tag")
JUDGED: tuple[ChatFormat, ...] = (MessagesFormat(), ShareGPTFormat(), PromptCompletionFormat(), AlpacaFormat())
"""The formats that a row without its judgment may have."""


class KTOFormat(RowFormat):
    """The answer is the completion, or all turns after the last question. Its label is 1 if it is good, else 0."""

    name = "kto"
    columns = ("prompt", "completion", "label")
    known_columns = frozenset(JUDGMENTS).union(*(format.known_columns for format in JUDGED))
    is_group = True
    is_question = False
    answers = ("answer",)
    nothing_learned = "each answer is switched off by its `train` or `weight`, or by data.learn"

    def fits(self, row: Mapping[str, Any]) -> bool:
        return any(isinstance(row.get(name), bool) for name in JUDGMENTS) and _judged(row) is not None

    def read(self, row: Mapping[str, Any], learn: LearnConfig, unused: Collection[str] = ()) -> Content:
        judgment = next((name for name in JUDGMENTS if row.get(name) is not None and name not in unused), None)
        if judgment is None:
            raise RowError("there is no judgment: expected the key 'label' or 'kto_tag'")
        if not isinstance(row[judgment], bool):
            raise RowError(f"{judgment} is {type_name(row[judgment])}, not true or false")
        format = _judged(row)
        if format is None:
            raise RowError("there is no chat beside the judgment: expected messages, or prompt and completion")
        label = [float(row[judgment])]
        if isinstance(row.get("prompt"), str) and isinstance(format, PromptCompletionFormat):
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


def _judged(row: Mapping[str, Any]) -> ChatFormat | None:
    return next((format for format in JUDGED if format.fits(row)), None)
