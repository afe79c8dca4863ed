"""`prompt`, `chosen`, `rejected`: three texts are texts, and a list makes a chat."""

from __future__ import annotations

import json

import pytest

from fxtune.data.formats.preference import PreferenceFormat
from fxtune.data.formats.registry import row_format
from fxtune.data.formats.row_format import Conversation, LearnConfig, PlainText, Preference

ASK = {"role": "user", "content": "two?"}
FOUR = {"role": "assistant", "content": "four"}


def read(row):
    content = PreferenceFormat().read(row, LearnConfig())
    assert isinstance(content, Preference)
    return content.answers


def test_texts_have_no_chat_template():
    row = {"prompt": "two? ", "chosen": "four", "rejected": "five"}
    assert isinstance(row_format(row), PreferenceFormat)
    assert read(row) == [PlainText("two? four", 5), PlainText("two? five", 5)]


@pytest.mark.parametrize(("prompt", "repeated"), [("Question: how many? ", True), ("Hi", False)])
def test_a_prompt_that_both_texts_repeat_is_no_part_of_the_answers(prompt, repeated):
    row = {"prompt": prompt, "chosen": f"{prompt}four", "rejected": f"{prompt}five"}
    texts = [f"{prompt if not repeated else ''}{prompt}{answer}" for answer in ("four", "five")]
    assert read(row) == [PlainText(text, len(prompt)) for text in texts]
    assert read({**row, "rejected": "five"})[0] == PlainText(f"{prompt}{prompt}four", len(prompt))


@pytest.mark.parametrize("prompt", ["two?", [ASK], json.dumps([ASK])])
@pytest.mark.parametrize("chosen", [[FOUR], FOUR, json.dumps([FOUR])])
def test_a_list_or_a_turn_makes_a_chat(prompt, chosen):
    row = {"prompt": prompt, "chosen": chosen, "rejected": "five"}
    assert isinstance(row_format(row), PreferenceFormat)
    for chat, answer in zip(read(row), ("four", "five"), strict=True):
        assert isinstance(chat, Conversation)
        assert chat.messages == [ASK, {"role": "assistant", "content": answer}]
        assert chat.supervised == [False, True]


def test_rows_with_a_part_missing_do_not_fit():
    row = {"prompt": "two? ", "chosen": "four", "rejected": "five"}
    for column in row:
        assert not PreferenceFormat().fits({key: value for key, value in row.items() if key != column})
        assert not PreferenceFormat().fits({**row, column: 4})
