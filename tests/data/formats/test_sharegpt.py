"""Chats in ShareGPT's format."""

from __future__ import annotations

from typing import Any

import pytest

from fxtune.data.formats.row_format import Conversation, LearnConfig
from fxtune.data.formats.sharegpt import ShareGPTFormat
from fxtune.data.formats.values import RowError


def test_names_of_roles_become_those_of_templates() -> None:
    row = {"conversations": [{"from": "human", "value": "u"}, {"from": "gpt", "value": "a"}]}
    assert ShareGPTFormat().fits(row)
    assert not ShareGPTFormat().fits({"conversations": [{"role": "user", "content": "u"}]})
    chat = ShareGPTFormat().read(row, LearnConfig())
    assert isinstance(chat, Conversation)
    assert chat.messages == [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"conversations": [{"from": "alien", "value": "u"}]}, "from 'alien' is unknown"),
    ],
)
def test_rows_that_cannot_be_used_have_a_reason(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(RowError, match=reason):
        ShareGPTFormat().read(row, LearnConfig())
