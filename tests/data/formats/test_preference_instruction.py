"""An instruction or a question with two answers, as Orca, Argilla and LLaMA-Factory have it, is a chat."""

from __future__ import annotations

import pytest

from fxtune.data.formats.preference_instruction import PreferenceInstructionFormat
from fxtune.data.formats.registry import row_format
from fxtune.data.formats.row_format import Conversation, LearnConfig, Preference
from fxtune.data.formats.values import RowError

ANSWERS = {"chosen": "four", "rejected": [{"role": "assistant", "content": "five"}]}


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"system": "add", "input": "two?"}, ["add", "two?"]),
        ({"system": "", "question": "two?"}, ["two?"]),
        ({"system": "add", "prompt": "two?"}, ["add", "two?"]),
        ({"instruction": "add", "input": "two, two"}, ["add\n\ntwo, two"]),
        ({"instruction": "add", "input": None, "history": [["one?", "1"]]}, ["one?", "1", "add"]),
    ],
)
def test_rows_are_chats(row, prompt):
    assert isinstance(row_format(row | ANSWERS), PreferenceInstructionFormat)
    content = PreferenceInstructionFormat().read(row | ANSWERS, LearnConfig())
    assert isinstance(content, Preference)
    for chat, answer in zip(content.answers, ("four", "five"), strict=True):
        assert isinstance(chat, Conversation)
        assert [turn["content"] for turn in chat.messages] == [*prompt, answer]
        assert chat.supervised == [False] * len(prompt) + [True]


def test_a_row_without_a_question_has_a_reason():
    with pytest.raises(RowError, match="instruction is empty"):
        PreferenceInstructionFormat().read({"instruction": " ", **ANSWERS}, LearnConfig())
