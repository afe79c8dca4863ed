"""The common beginning of two chats is their prompt; what is wrong with a pair is named."""

from __future__ import annotations

import math
from typing import Any

import pytest

from fxtune.data.formats.registry import row_format
from fxtune.data.formats.row_format import Conversation, LearnConfig, Preference
from fxtune.data.formats.values import RowError

ASK = {"role": "user", "content": "two and two?"}
FOUR, FIVE = ({"role": "assistant", "content": text} for text in ("it is four.", "it is five."))
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}]}
RESULT = {"role": "tool", "content": "4"}


def pair(row: dict[str, Any], **options: Any) -> Preference:
    found = row_format(row)
    assert found is not None
    content = found.read(row, LearnConfig(**options))
    assert isinstance(content, Preference)
    return content


def learned(content: Preference) -> list[list[str]]:
    """The contents of the learned turns of each answer."""
    return [
        [message.get("content", "call") for message, on in zip(chat.messages, chat.supervised, strict=True) if on]
        for chat in content.answers
        if isinstance(chat, Conversation)
    ]


@pytest.mark.parametrize(
    ("chosen", "rejected", "expected"),
    [
        ([ASK, FOUR], [ASK, FIVE], [["it is four."], ["it is five."]]),
        # A shared earlier answer is prompt, and so is a call that both sides make.
        ([ASK, FIVE, ASK, FOUR], [ASK, FIVE, ASK, FIVE], [["it is four."], ["it is five."]]),
        ([ASK, CALL, RESULT, FOUR], [ASK, CALL, RESULT, FIVE], [["it is four."], ["it is five."]]),
        # One answer calls a tool, and its result is context.
        ([ASK, CALL, RESULT, FOUR], [ASK, FIVE], [["call", "it is four."], ["it is five."]]),
        # Answers that differ in an earlier turn: the later question belongs to the answer, and is not learned.
        ([ASK, FOUR, ASK, FOUR], [ASK, FIVE, ASK, FOUR], [["it is four."] * 2, ["it is five.", "it is four."]]),
    ],
)
def test_turns_after_the_common_beginning_are_answers(chosen, rejected, expected) -> None:
    assert learned(pair({"chosen": chosen, "rejected": rejected})) == expected


def test_answers_with_the_same_first_words_are_learned_from_their_first_word() -> None:
    """trl#6472, #6498: a beginning of equal characters, or an answer that begins the other one."""
    longer = {"role": "assistant", "content": "it is four. Or five."}
    for chosen, rejected in ((FOUR, longer), (longer, FOUR), (FOUR, FIVE)):
        expected = [[chosen["content"]], [rejected["content"]]]
        assert learned(pair({"chosen": [ASK, chosen], "rejected": [ASK, rejected]})) == expected


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": [ASK], "chosen": [FOUR], "rejected": [FOUR]}, "chosen and rejected are identical"),
        ({"prompt": "two? ", "chosen": "four", "rejected": "four"}, "chosen and rejected are identical"),
        ({"chosen": [ASK, FOUR], "rejected": [ASK]}, "no answer is left of rejected"),
        ({"chosen": [ASK, FOUR], "rejected": [ASK, FOUR, ASK, FIVE]}, "no answer is left of chosen"),
        ({"chosen": [ASK, FOUR], "rejected": [{**ASK, "content": "two?"}, FIVE]},
         r"the prompts differ: chosen\[0\].content is not rejected\[0\].content"),
        ({"chosen": [ASK, CALL, RESULT, FOUR], "rejected": [ASK, CALL, {**RESULT, "content": "5"}, FIVE]},
         r"the prompts differ: chosen\[2\].content is not rejected\[2\].content"),
        ({"prompt": [ASK], "chosen": [FOUR], "rejected": [ASK, FIVE]}, "the prompts differ"),
        ({"chosen": [{"role": "system", "content": "Be kind."}, ASK, FOUR], "rejected": [ASK, FIVE]},
         "write the system turn in both, or in neither"),
        ({"prompt": [ASK], "chosen": [FOUR], "rejected": [{**FIVE, "content": " "}]},
         r"rejected\[0\].content is empty, so the model would learn"),
        ({"prompt": "two? ", "chosen": "", "rejected": "four"}, "chosen is empty, so the model would learn"),
        ({"prompt": "", "chosen": "two", "rejected": "four"}, "prompt is empty"),
        ({"prompt": [ASK], "chosen": 4, "rejected": "five"}, "chosen is a number, not a text, a turn or a list"),
        ({"prompt": [ASK], "chosen": [FOUR], "rejected": [{**FIVE, "train": False}]},
         "no turn of rejected is learned: its `train`"),
        ({"prompt": [ASK], "chosen": [FOUR], "rejected": [FIVE], "margin": "2"},
         "margin is a string, not a number"),
        ({"prompt": [ASK], "chosen": [FOUR], "rejected": [FIVE], "margin": math.nan},
         "margin is nan, not a number"),
        ({"prompt": "two?", "chosen": "four", "rejected": "five", "tools": [{"name": "add"}]},
         "tools is for chats"),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_used_have_a_reason(row, reason) -> None:
    found = row_format({**row, "chosen": [ASK, FOUR]} if "prompt" not in row else {**row, "chosen": "four"})
    assert found is not None
    with pytest.raises(RowError, match=reason):
        found.read(row, LearnConfig())


def test_margins_and_scores_are_labels() -> None:
    row = {"prompt": "two? ", "chosen": "four", "rejected": "five"}
    assert pair({**row, "margin": 2}).labels == [2.0, 0.0]
    assert pair({**row, "score_chosen": 8.5, "score_rejected": 3}).labels == [8.5, 3.0]
    assert pair({**row, "chosen_score": 8.5, "rejected_score": 3, "margin": 1}).labels == [1.0, 0.0]
    for unlabelled in (row, {**row, "score_chosen": 8.5}, {**row, "margin": None, "score_rejected": 1}):
        assert all(map(math.isnan, pair(unlabelled).labels))


def test_tools_variables_and_unused_columns_are_read_as_in_supervised_rows() -> None:
    tool = {"type": "function", "function": {"name": "add", "description": None}}
    row = {
        "chosen": [ASK, FOUR],
        "rejected": [ASK, FIVE],
        "tools": [tool],
        "chat_template_kwargs": {"enable_thinking": False},
    }
    for chat in pair(row).answers:
        assert isinstance(chat, Conversation)
        assert chat.tools == [{"type": "function", "function": {"name": "add"}}]
        assert chat.variables == {"enable_thinking": False}
    found = row_format(row)
    assert found is not None
    content = found.read(row, LearnConfig(), ["tools"])
    assert isinstance(content, Preference)
    assert all(isinstance(chat, Conversation) and chat.tools is None for chat in content.answers)


def test_learn_chooses_among_the_turns_of_an_answer() -> None:
    row = {"chosen": [ASK, CALL, RESULT, FOUR], "rejected": [ASK, FIVE, ASK, FOUR]}
    assert learned(pair(row, tool_calls=False)) == [["it is four."], ["it is five.", "it is four."]]
    assert learned(pair(row, last_turn_only=True)) == [["it is four."], ["it is four."]]
