"""Alpaca's columns as a chat."""

from __future__ import annotations

from typing import Any

import pytest

from fxtune.data.formats.alpaca import AlpacaFormat
from fxtune.data.formats.row_format import Conversation, LearnConfig
from fxtune.data.formats.values import RowError


def test_history_and_input_become_turns() -> None:
    row = {"system": "s", "history": [["q", "r"]], "instruction": "u", "input": "v", "output": "a"}
    assert AlpacaFormat().fits(row)
    chat = AlpacaFormat().read(row, LearnConfig())
    assert isinstance(chat, Conversation)
    assert [message["content"] for message in chat.messages] == ["s", "q", "r", "u\n\nv", "a"]
    assert chat.supervised == [False, False, True, False, True]


def test_an_empty_input_adds_nothing() -> None:
    for row in ({"instruction": "u", "output": "a"}, {"instruction": "u", "output": "a", "input": ""}):
        chat = AlpacaFormat().read(row, LearnConfig())
        assert isinstance(chat, Conversation)
        assert [message["content"] for message in chat.messages] == ["u", "a"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"instruction": " ", "output": "a"}, "instruction is empty"),
        ({"instruction": "u", "output": "a", "history": ["q"]}, "history is not a list of .* pairs"),
        ({"instruction": "u"}, "output is null"),
    ],
)
def test_rows_that_cannot_be_used_have_a_reason(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(RowError, match=reason):
        AlpacaFormat().read(row, LearnConfig())
