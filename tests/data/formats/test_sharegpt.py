"""Chats in ShareGPT's format."""

from __future__ import annotations

from typing import Any

import pytest

from fxtune.data.formats.row_format import Conversation, LearnConfig
from fxtune.data.formats.sharegpt import ShareGPT
from fxtune.data.formats.values import RowError


def test_names_of_roles_become_those_of_templates() -> None:
    row = {"conversations": [{"from": "human", "value": "u"}, {"from": "gpt", "value": "a"}]}
    assert ShareGPT().fits(row)
    assert not ShareGPT().fits({"conversations": [{"role": "user", "content": "u"}]})
    chat = ShareGPT().read(row, LearnConfig())
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
        ShareGPT().read(row, LearnConfig())
