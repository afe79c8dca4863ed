"""Alpaca's format: `instruction`, `output`, optionally `input` and `history` (earlier [question, answer] pairs)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fxtune.data.formats.chat_format import VARIABLES, ChatFormat
from fxtune.data.formats.image_parts import COLUMNS
from fxtune.data.formats.row_format import Conversation
from fxtune.data.formats.values import RowError, require_text


class AlpacaFormat(ChatFormat):
    name = "alpaca"
    columns = ("instruction", "output")
    known_columns = frozenset(("instruction", "input", "output", "history", "tools", *COLUMNS, VARIABLES, "text"))
    needs_template = True

    def fits(self, row: Mapping[str, Any]) -> bool:
        return all(isinstance(row.get(column), str) for column in self.columns)

    def turns(self, row: Mapping[str, Any]) -> Conversation:
        chat = Conversation()
        # In a source where shapes.py converts questions with images to this format, other questions stay as they are.
        if row.get("instruction") is None and row.get("output") is None:
            row = {**row, "instruction": row.get("prompt"), "output": row.get("completion")}
        self.add_question(chat, row)
        chat.add({"role": "assistant", "content": require_text(row.get("output"), "output")}, "output")
        return chat

    @staticmethod
    def add_question(chat: Conversation, row: Mapping[str, Any]) -> None:
        """Add the system prompt, the history and the question. Raises RowError."""
        if row.get("system") is not None and require_text(row["system"], "system"):
            chat.add({"role": "system", "content": row["system"]}, "system")
        for index, (question, answer) in enumerate(_history(row.get("history"))):
            chat.add({"role": "user", "content": question}, f"history[{index}][0]")
            chat.add({"role": "assistant", "content": answer}, f"history[{index}][1]")
        instruction = require_text(row.get("instruction"), "instruction")
        extra = require_text("" if row.get("input") is None else row["input"], "input")
        question = "\n\n".join(part for part in (instruction, extra) if part)
        if not question.strip():
            raise RowError("instruction is empty")
        chat.add({"role": "user", "content": question}, "instruction")


def _history(history: Any) -> list[tuple[str, str]]:
    pairs = [] if history is None or history == "" else history
    if not isinstance(pairs, (list, tuple)) or not all(
        isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pairs
    ):
        raise RowError("history is not a list of [question, answer] pairs")
    return [(require_text(ask, "history"), require_text(answer, "history")) for ask, answer in pairs]
