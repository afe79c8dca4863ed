"""ShareGPT's preferences: a chat, and two next turns."""

from __future__ import annotations

import pytest

from fxtune.data.formats.preference_turns import PreferenceTurnsFormat
from fxtune.data.formats.registry import row_format
from fxtune.data.formats.row_format import Conversation, LearnConfig, Preference
from fxtune.data.formats.values import RowError

ASK = {"from": "human", "value": "two?"}
FOUR, FIVE = ({"from": "gpt", "value": text} for text in ("four", "five"))


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": [ASK], "chosen": FOUR, "rejected": FIVE},
        {"conversations": [ASK], "chosen": [FOUR], "rejected": "five"},
        {"messages": [{"role": "user", "content": "two?"}], "chosen": "four", "rejected": FIVE},
    ],
)
def test_both_answers_follow_the_chat(row):
    assert isinstance(row_format({**row, "system": "add"}), PreferenceTurnsFormat)
    content = PreferenceTurnsFormat().read({**row, "system": "add"}, LearnConfig())
    assert isinstance(content, Preference)
    for chat, answer in zip(content.answers, ("four", "five"), strict=True):
        assert isinstance(chat, Conversation)
        assert [turn["content"] for turn in chat.messages] == ["add", "two?", answer]
        assert chat.supervised == [False, False, True]


def test_a_chat_that_ends_with_an_answer_is_refused():
    row = {"conversations": [ASK, FOUR], "chosen": FOUR, "rejected": FIVE}
    with pytest.raises(RowError, match=r"conversations\[1\].value is an answer"):
        PreferenceTurnsFormat().read(row, LearnConfig())
