"""An instruction with two answers: `instruction`, `question` or `input`, with `chosen` and `rejected`.

Rows of Orca and Argilla have `system`, and `input` or `question`. Rows of LLaMA-Factory have `instruction`, `input`
and `history`. Each row becomes a chat.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fxtune.data.formats.alpaca import AlpacaFormat
from fxtune.data.formats.chat_format import add_answer
from fxtune.data.formats.pair_format import CHOSEN, KNOWN_COLUMNS, REJECTED, PairFormat, is_answer
from fxtune.data.formats.row_format import Conversation

QUESTIONS = ("instruction", "question", "input", "prompt")


class PreferenceInstructionFormat(PairFormat):
    name = "preference_instruction"
    columns = ("instruction", CHOSEN, REJECTED)
    known_columns = KNOWN_COLUMNS | {*QUESTIONS, "system", "history"}
    needs_template = True

    def fits(self, row: Mapping[str, Any]) -> bool:
        """`prompt` is an instruction only beside `system`. Without `system`, preference.py reads it as plain text."""
        is_chat = row.get("prompt") is None or isinstance(row.get("system"), str)
        return is_chat and _question(row) is not None and is_answer(row.get(CHOSEN)) and is_answer(row.get(REJECTED))

    def sides(self, row: Mapping[str, Any]) -> tuple[Conversation, Conversation]:
        question = _question(row) or "instruction"
        prompt = {"system": row.get("system"), "history": row.get("history"), "instruction": row.get(question)}
        if question != "input":
            prompt["input"] = row.get("input")
        chats = Conversation(), Conversation()
        for chat, column in zip(chats, self.answers, strict=True):
            AlpacaFormat().add_question(chat, prompt)
            chat.places[-1] = question
            add_answer(chat, row.get(column), column)
        return chats


def _question(row: Mapping[str, Any]) -> str | None:
    """The column with the question; None if all columns of QUESTIONS are empty."""
    return next((name for name in QUESTIONS if isinstance(row.get(name), str) and row[name].strip()), None)
