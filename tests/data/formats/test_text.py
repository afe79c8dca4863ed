"""Plain text is learned as a whole."""

from __future__ import annotations

from typing import Any

import pytest

from fxtune.data.formats.row_format import LearnConfig, PlainText
from fxtune.data.formats.text import TextFormat
from fxtune.data.formats.values import RowError


def test_text_is_learned_from_its_first_character() -> None:
    assert TextFormat().fits({"text": "two"})
    assert TextFormat().read({"text": " two "}, LearnConfig()) == PlainText(" two ", 0)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"text": " \n"}, "text is empty"),
        ({"text": None}, "text is null"),
    ],
)
def test_rows_that_cannot_be_used_have_a_reason(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(RowError, match=reason):
        TextFormat().read(row, LearnConfig())
