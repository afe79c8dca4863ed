"""Two whole chats, as messages or as the texts of HH-RLHF, beside columns that repeat a part of them."""

from __future__ import annotations

import pytest

from fxtune.data.formats.preference_chats import PreferenceChatsFormat
from fxtune.data.formats.registry import row_format
from fxtune.data.formats.row_format import Conversation, LearnConfig, Preference
from fxtune.data.formats.values import RowError

ASK = {"role": "user", "content": "two?"}
FOUR, FIVE = ({"role": "assistant", "content": text} for text in ("four", "five"))
SYSTEM = {"role": "system", "content": "add"}


def chats(row):
    assert isinstance(row_format(row), PreferenceChatsFormat)
    content = PreferenceChatsFormat().read(row, LearnConfig())
    assert isinstance(content, Preference)
    for chat in content.answers:
        assert isinstance(chat, Conversation)
    return [[(turn["role"], turn["content"], on) for turn, on in zip(chat.messages, chat.supervised, strict=True)]
            for chat in content.answers]  # fmt: skip


def test_columns_of_ultrafeedback():
    row = {
        "prompt": "two?",
        "chosen": [SYSTEM, ASK, FOUR],
        "rejected": [SYSTEM, ASK, FIVE],
        "messages": [SYSTEM, ASK, FOUR],
        "score_chosen": 8.0,
        "score_rejected": 6.5,
    }
    expected = [("system", "add", False), ("user", "two?", False)]
    assert chats(row) == [[*expected, ("assistant", "four", True)], [*expected, ("assistant", "five", True)]]
    assert chats({**row, "prompt": [SYSTEM, ASK], "messages": None}) == chats(row)


@pytest.mark.parametrize(
    ("column", "value"),
    [("prompt", "three?"), ("prompt", [ASK]), ("messages", [SYSTEM, ASK, FIVE]), ("conversations", [FOUR])],
)
def test_a_column_beside_the_chats_that_does_not_repeat_them_is_refused(column, value):
    row = {"chosen": [SYSTEM, ASK, FOUR], "rejected": [SYSTEM, ASK, FIVE], column: value}
    with pytest.raises(RowError, match=rf"{column} is no part of chosen.*`unused: \[{column}\]`"):
        PreferenceChatsFormat().read(row, LearnConfig())
    assert PreferenceChatsFormat().read(row, LearnConfig(), [column])


def test_texts_of_hh_are_split_at_their_turns():
    """The answers share their first words, and one of them quotes a name of a turn inside a line."""
    start = "\n\nHuman: hi\n\nAssistant: hello\n\nHuman: who\nare you?\n\nAssistant:"
    row = {"chosen": f"{start} I am the model.", "rejected": f"{start} I am Human: no."}
    expected = [("user", "hi", False), ("assistant", "hello", False), ("user", "who\nare you?", False)]
    assert chats(row) == [
        [*expected, ("assistant", "I am the model.", True)],
        [*expected, ("assistant", "I am Human: no.", True)],
    ]
    apart = {"prompt": start, "chosen": " I am the model.", "rejected": " I am Human: no."}
    assert chats(apart) == chats(row)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"chosen": "four", "rejected": "five"}, "chosen is a text without turns"),
        ({"chosen": "so:\n\nHuman: a\n\nAssistant: b", "rejected": ""}, "chosen is a text without turns"),
        ({"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant: "}, "rejected, turn 2 is empty"),
        ({"chosen": 4, "rejected": "five"}, "chosen is a number, not a list of messages"),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_used_have_a_reason(row, reason):
    with pytest.raises(RowError, match=reason):
        PreferenceChatsFormat().read(row, LearnConfig())
