"""One answer with a judgment, in the formats of supervised rows."""

from __future__ import annotations

import pytest

from fxtune.data.formats.kto import KTOFormat
from fxtune.data.formats.registry import row_format
from fxtune.data.formats.row_format import Conversation, LearnConfig, PlainText, Preference
from fxtune.data.formats.values import RowError

ASK, FOUR = {"role": "user", "content": "two?"}, {"role": "assistant", "content": "four"}


def read(row) -> Preference:
    assert isinstance(row_format(row), KTOFormat)
    content = KTOFormat().read(row, LearnConfig())
    assert isinstance(content, Preference)
    return content


def test_a_prompt_and_its_completion_as_texts():
    content = read({"prompt": "two? ", "completion": "four", "label": True})
    assert (content.answers, content.labels) == ([PlainText("two? four", 5)], [1.0])


@pytest.mark.parametrize(
    ("row", "learned"),
    [
        ({"prompt": [ASK, FOUR, ASK], "completion": [FOUR]}, [False, False, False, True]),
        ({"prompt": [ASK], "completion": "four"}, [False, True]),
        ({"prompt": "two?", "completion": [FOUR]}, [False, True]),
        ({"messages": [ASK, {**FOUR, "content": ""}, ASK, FOUR]}, [False, False, False, True]),
        ({"conversations": [{"from": "human", "value": "two?"}, {"from": "gpt", "value": "four"}]}, [False, True]),
        ({"instruction": "two?", "output": "four", "history": [["one?", "1"]]}, [False, False, False, True]),
    ],
)
@pytest.mark.parametrize("name", ["label", "kto_tag"])
def test_the_turns_after_the_last_question_are_judged(row, learned, name):
    content = read({**row, name: False})
    (chat,) = content.answers
    assert isinstance(chat, Conversation)
    assert chat.supervised == learned
    assert content.labels == [0.0]


@pytest.mark.parametrize(
    ("label", "is_good"), [(1, 1.0), (0, 0.0), ("true", 1.0), ("False", 0.0), ("1", 1.0), (0.0, 0.0)]
)
def test_numbers_and_texts_are_judgments_as_booleans_are(label, is_good):
    assert read({"messages": [ASK, FOUR], "label": label}).labels == [is_good]


@pytest.mark.parametrize("label", [2, "good", None, 0.5])
def test_other_values_are_no_judgment(label):
    row = {"messages": [ASK, FOUR], "label": label}
    assert not isinstance(row_format(row), KTOFormat)
    reason = "there is no judgment" if label is None else "label is .*, not true or false"
    with pytest.raises(RowError, match=reason):
        KTOFormat().read(row, LearnConfig())


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"text": "four", "label": True}, "there is no chat beside the judgment"),
        ({"messages": [ASK, {**FOUR, "content": ""}], "label": True}, r"messages\[1\].content is empty"),
        ({"messages": [ASK, FOUR, ASK], "label": True}, "no turn of the answer is learned"),
        ({"prompt": "two?", "completion": " ", "label": True}, "completion is empty"),
    ],
)
def test_rows_that_cannot_be_used_have_a_reason(row, reason):
    with pytest.raises(RowError, match=reason):
        KTOFormat().read(row, LearnConfig())
