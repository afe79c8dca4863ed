"""ms-swift's preferences: a chat, and what else stands after its last question."""

from __future__ import annotations

import pytest

from fxtune.data.formats.preference_messages import PreferenceMessagesFormat
from fxtune.data.formats.registry import row_format
from fxtune.data.formats.row_format import Conversation, LearnConfig, Preference
from fxtune.data.formats.values import RowError

ASK = {"role": "user", "content": "two?"}
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}]}
RESULT = {"role": "tool", "content": "4"}
FOUR, FIVE = ({"role": "assistant", "content": text} for text in ("four", "five"))


@pytest.mark.parametrize(
    "rejected",
    [{"rejected_response": "five"}, {"rejected_messages": [FIVE]}, {"rejected_messages": [ASK, FOUR, ASK, FIVE]}],
)
def test_rejected_answer_stands_after_the_last_question(rejected):
    row = {"messages": [ASK, FOUR, ASK, CALL, RESULT, FOUR], "system": "add", **rejected}
    assert isinstance(row_format(row), PreferenceMessagesFormat)
    content = PreferenceMessagesFormat().read(row, LearnConfig())
    assert isinstance(content, Preference)
    chosen, other = content.answers
    assert isinstance(chosen, Conversation)
    assert isinstance(other, Conversation)
    assert [turn.get("content") for turn in other.messages] == ["add", "two?", "four", "two?", "five"]
    assert chosen.messages[:4] == other.messages[:4]
    assert (chosen.supervised, other.supervised) == ([False] * 4 + [True, False, True], [False] * 4 + [True])


def test_two_rejected_answers_are_refused():
    row = {"messages": [ASK, FOUR], "rejected_response": "five", "rejected_messages": [FIVE]}
    with pytest.raises(RowError, match="two rejected answers; keep one"):
        PreferenceMessagesFormat().read(row, LearnConfig())
