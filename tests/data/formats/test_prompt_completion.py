"""A prompt and its completion: two strings, or a chat."""

from __future__ import annotations

from typing import Any

import pytest

from fxtune.data.formats.prompt_completion import PromptCompletionFormat
from fxtune.data.formats.row_format import Conversation, LearnConfig, PlainText
from fxtune.data.formats.values import RowError

USER, ANSWER = {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}


def test_strings_are_one_text_and_lists_a_chat() -> None:
    assert PromptCompletionFormat().read({"prompt": "two ", "completion": "four"}, LearnConfig()) == PlainText(
        "two four", 4
    )
    chat = PromptCompletionFormat().read({"prompt": [USER, ANSWER, USER], "completion": [ANSWER]}, LearnConfig())
    assert isinstance(chat, Conversation)
    assert chat.supervised == [False, False, False, True], "assistant turns of a prompt are not learned"


@pytest.mark.parametrize(
    ("row", "fits"),
    [
        ({"prompt": "a", "completion": "b"}, True),
        ({"prompt": [USER], "completion": [ANSWER]}, True),
        ({"prompt": "a"}, False),
        ({"prompt": [], "completion": [ANSWER]}, False),
    ],
)
def test_which_rows_fit(row: dict[str, Any], fits: bool) -> None:
    assert PromptCompletionFormat().fits(row) is fits


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "a", "completion": " \n"}, "completion is empty"),
        ({"prompt": "a"}, "completion is null"),
        ({"prompt": [USER], "completion": [USER]}, "no assistant turn in completion"),
        (
            {"prompt": "a", "completion": "b", "chat_template_kwargs": {"x": 1}},
            "is for chats, and this prompt is a text",
        ),
    ],
)
def test_rows_that_cannot_be_used_have_a_reason(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(RowError, match=reason):
        PromptCompletionFormat().read(row, LearnConfig())
