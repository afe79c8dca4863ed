"""Each row format reads its rows and names what is wrong with one; formats are detected, and unknown rows get a hint."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from support.rows import write_jsonl

from fxtune.data.config import SourceConfig
from fxtune.data.formats.kto import KTOFormat
from fxtune.data.formats.preferences import PreferenceFormat
from fxtune.data.formats.registry import FORMATS, detect_format, row_format
from fxtune.data.formats.row_format import (
    Content,
    Conversation,
    LearnConfig,
    PlainText,
    Preference,
    RowGroup,
    TokenIds,
)
from fxtune.data.formats.values import RowError
from fxtune.data.read.sources import open_source
from fxtune.errors import DataError

SYSTEM, ASK = {"role": "system", "content": "add"}, {"role": "user", "content": "two?"}
FOUR, FIVE = ({"role": "assistant", "content": text} for text in ("four", "five"))
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}]}
RESULT = {"role": "tool", "content": "4"}
HUMAN, GPT, GPT5 = (
    {"from": name, "value": text} for name, text in (("human", "two?"), ("gpt", "four"), ("gpt", "five"))
)
HH = "\n\nHuman: hi\n\nAssistant: hello\n\nHuman: who\nare you?\n\nAssistant:"
s, q = ("system", "add", False), ("user", "two?", False)
shown, four, five = ("assistant", "four", False), ("assistant", "four", True), ("assistant", "five", True)
hh = [("user", "hi", False), ("assistant", "hello", False), ("user", "who\nare you?", False)]
MODEL, NO = ("assistant", "I am the model.", True), ("assistant", "I am Human: no.", True)

READ: list[tuple[str, dict[str, Any], Any]] = [
    ("messages", {"messages": [ASK, FOUR]}, [q, four]),
    ("messages", {"messages": [ASK, FOUR], "system": "add", "text": "rendered"}, [s, q, four]),
    ("messages", {"messages": [SYSTEM, ASK, FOUR], "system": "other"}, [s, q, four]),
    ("messages", {"messages": json.dumps([ASK, FOUR])}, [q, four]),
    ("sharegpt", {"conversations": [HUMAN, GPT], "system": "add"}, [s, q, four]),
    ("alpaca", {"instruction": "two?", "output": "four", "input": "", "text": "both"}, [q, four]),
    ("alpaca", {"instruction": "a", "input": "b", "output": "four", "system": "add", "history": [["two?", "five"]]},
     [s, q, five, ("user", "a\n\nb", False), four]),
    ("prompt_completion", {"prompt": "two? ", "completion": "four"}, ("two? four", 5)),
    ("prompt_completion", {"prompt": [ASK, FOUR, ASK], "completion": [FOUR]}, [q, shown, q, four]),
    ("tokens", {"input_ids": [5, 6, 7], "text": "source"}, ([5, 6, 7], [True, True, True])),
    ("text", {"text": "two ", "id": 4}, ("two ", 0)),
    ("text", {"text": "two", "question": "b", "answer": "c"}, ("two", 0)),
    ("preference", {"prompt": "two? ", "chosen": "four", "rejected": "five"}, [("two? four", 5), ("two? five", 5)]),
    ("preference", {"prompt": "Hi", "chosen": "Hi four", "rejected": "Hi five"}, [("HiHi four", 2), ("HiHi five", 2)]),
    ("preference", {"prompt": "Question: how many? ", "chosen": "Question: how many? four",
                    "rejected": "Question: how many? five"},
     [("Question: how many? four", 20), ("Question: how many? five", 20)]),
    ("preference", {"prompt": [ASK], "chosen": FOUR, "rejected": "five"}, [[q, four], [q, five]]),
    ("preference", {"prompt": "two?", "chosen": [FOUR], "rejected": [FIVE]}, [[q, four], [q, five]]),
    ("preference", {"prompt": json.dumps([ASK]), "chosen": json.dumps([FOUR]), "rejected": "five"}, [[q, four], [q, five]]),
    ("preference_chats", {"prompt": "two?", "chosen": [SYSTEM, ASK, FOUR], "rejected": [SYSTEM, ASK, FIVE],
                          "messages": [SYSTEM, ASK, FOUR], "score_chosen": 8.0, "score_rejected": 6.5},
     [[s, q, four], [s, q, five]]),
    ("preference_chats", {"prompt": [SYSTEM, ASK], "chosen": [SYSTEM, ASK, FOUR], "rejected": [SYSTEM, ASK, FIVE]},
     [[s, q, four], [s, q, five]]),
    ("preference_chats", {"chosen": f"{HH} I am the model.", "rejected": f"{HH} I am Human: no."}, [[*hh, MODEL], [*hh, NO]]),
    ("preference_chats", {"prompt": HH, "chosen": " I am the model.", "rejected": " I am Human: no."},
     [[*hh, MODEL], [*hh, NO]]),
    ("preference_turns", {"conversations": [HUMAN], "chosen": GPT, "rejected": GPT5, "system": "add"},
     [[s, q, four], [s, q, five]]),
    ("preference_turns", {"conversations": [HUMAN], "chosen": [GPT], "rejected": "five"}, [[q, four], [q, five]]),
    ("preference_turns", {"messages": [ASK], "chosen": "four", "rejected": GPT5}, [[q, four], [q, five]]),
    *(("preference_messages", {"messages": [ASK, FOUR, ASK, CALL, RESULT, FOUR], **rejected},
       [[q, shown, q, ("assistant", "call", True), ("tool", "4", False), four], [q, shown, q, five]])
      for rejected in ({"rejected_response": "five"}, {"rejected_messages": [FIVE]},
                       {"rejected_messages": [ASK, FOUR, ASK, FIVE]})),
    *(("preference_instruction", {**row, "chosen": "four", "rejected": [FIVE]}, [[*prompt, four], [*prompt, five]])
      for row, prompt in (({"system": "add", "input": "two?"}, [s, q]), ({"system": "", "question": "two?"}, [q]),
                          ({"system": "add", "prompt": "two?"}, [s, q]),
                          ({"instruction": "two", "input": "and"}, [("user", "two\n\nand", False)]),
                          ({"instruction": "two?", "input": None, "history": [["two?", "four"]]}, [q, shown, q]))),
    ("kto", {"prompt": "two? ", "completion": "four", "label": True}, [("two? four", 5)]),
    *(("kto", {**row, name: False}, [expected])
      for name in ("label", "kto_tag")
      for row, expected in (({"prompt": [ASK, FOUR, ASK], "completion": [FOUR]}, [q, shown, q, four]),
                            ({"prompt": [ASK], "completion": "four"}, [q, four]),
                            ({"prompt": "two?", "completion": [FOUR]}, [q, four]),
                            ({"messages": [ASK, {**FOUR, "content": ""}, ASK, FOUR]},
                             [q, ("assistant", "", False), q, four]),
                            ({"conversations": [HUMAN, GPT]}, [q, four]),
                            ({"instruction": "two?", "output": "four", "history": [["two?", "four"]]}, [q, shown, q, four]))),
]  # fmt: skip


def content_of(content: Content) -> Any:
    """(role, text, is learned) of each turn of a chat; (text, first learned character); (ids, which are learned); or
    the content of each answer."""
    if isinstance(content, Conversation):
        turns = zip(content.messages, content.supervised, strict=True)
        return [(turn["role"], turn.get("content", "call"), learned) for turn, learned in turns]
    if isinstance(content, Preference):
        return [content_of(answer) for answer in content.answers]
    assert isinstance(content, (PlainText, TokenIds))
    if isinstance(content, PlainText):
        return content.text, content.first
    return tuple(vars(content).values())


@pytest.mark.parametrize(("format", "row", "expected"), READ)
def test_rows_are_detected_and_read(format: str, row: dict[str, Any], expected: Any) -> None:
    found = row_format(row)
    assert found is FORMATS[format]
    assert content_of(found.read(row, LearnConfig())) == expected


@pytest.mark.parametrize(
    ("masks", "supervised"),
    [
        ({"labels": [-100, 6, 7]}, [False, True, True]),
        ({"assistant_masks": [1, 0, 1], "attention_mask": [1, 1, 1]}, [True, False, True]),
        ({"completion_mask": [0, 1, 1]}, [False, True, True]),
        ({"loss_mask": [False, True, True], "labels": [5, 6, -100]}, [False, True, False]),
    ],
)
def test_labels_and_masks_say_which_ids_are_learned(masks: dict[str, Any], supervised: list[bool]) -> None:
    row = {"input_ids": [5, 6, 7], **masks}
    assert row_format(row) is FORMATS["tokens"]
    assert FORMATS["tokens"].read(row, LearnConfig()) == TokenIds([5, 6, 7], supervised)


@pytest.mark.parametrize("label", [True, 1, "true", "1", False, 0, 0.0, "False"])
def test_numbers_and_texts_are_judgments_as_booleans_are(label: Any) -> None:
    content = KTOFormat().read({"messages": [ASK, FOUR], "label": label}, LearnConfig())
    assert isinstance(content, Preference)
    assert content.labels == [float(label in (True, "true", "1"))]


def test_labels_of_a_group_are_numbers_or_null() -> None:
    texts = [{"text": "two"}, {"text": "four"}]
    assert row_format({"documents": texts}) is FORMATS["group"]
    assert row_format({"documents": texts, "question": "a", "answer": "b"}) is not FORMATS["group"]
    for row, labels in (({"labels": [1, None]}, [1, math.nan]), ({}, [math.nan] * 2)):
        found = FORMATS["group"].read({"documents": texts, **row}, LearnConfig())
        assert isinstance(found, RowGroup)
        assert (found.rows, str(found.labels)) == (texts, str([float(one) for one in labels]))


def test_pairs_with_a_part_missing_do_not_fit() -> None:
    row = {"prompt": "two? ", "chosen": "four", "rejected": "five"}
    for column in row:
        assert not PreferenceFormat().fits({key: value for key, value in row.items() if key != column})
        assert not PreferenceFormat().fits({**row, column: 4})


def test_a_column_named_unused_is_not_read() -> None:
    chat = FORMATS["messages"].read({"messages": [ASK, FOUR], "tools": [{"name": "f"}]}, LearnConfig(), ["tools"])
    assert isinstance(chat, Conversation)
    assert chat.tools is None
    row = {"chosen": [SYSTEM, ASK, FOUR], "rejected": [SYSTEM, ASK, FIVE], "prompt": "three?"}
    assert FORMATS["preference_chats"].read(row, LearnConfig(), ["prompt"])


TEXTS, PAIR = [{"text": "two"}, {"text": "four"}], {"chosen": [SYSTEM, ASK, FOUR], "rejected": [SYSTEM, ASK, FIVE]}


@pytest.mark.parametrize(
    ("format", "row", "reason"),
    [
        ("alpaca", {"instruction": "u", "output": "a", "history": ["q"]}, "history is not a list of .* pairs"),
        ("text", {"text": " "}, "text is empty"),
        ("text", {"text": None}, "text is null"),
        ("tokens", {"input_ids": []}, "input_ids is empty"),
        ("tokens", {"input_ids": [1, "x"]}, r"input_ids\[1\] is a string, not an integer"),
        ("tokens", {"input_ids": [1, 2], "labels": [1]}, "labels has 1 entries and input_ids has 2"),
        ("tokens", {"input_ids": [1, 2], "labels": [2, -100]}, r"labels\[0\] is 2; it must be -100"),
        ("tokens", {"input_ids": [1, 2], "assistant_masks": [0, 2]}, r"assistant_masks\[1\] is 2; use 0 or 1"),
        ("tokens", {"input_ids": [1, 2], "attention_mask": [0, 1]}, "attention_mask has zeros"),
        ("prompt_completion", {"prompt": "a", "completion": " \n"}, "completion is empty"),
        ("prompt_completion", {"prompt": "a"}, "completion is null"),
        ("prompt_completion", {"prompt": "a", "completion": "b", "chat_template_kwargs": {"x": 1}}, "is for chats"),
        ("group", {"documents": []}, "documents is empty"),
        ("group", {"documents": {"text": "two"}}, "documents is an object, not a list of rows"),
        ("group", {"documents": [*TEXTS, "two"]}, r"documents\[2\] is a string, not an object"),
        ("group", {"documents": TEXTS, "labels": [1]}, "labels is 1 entries; it must be a list of 2 numbers"),
        ("group", {"documents": TEXTS, "labels": ["good", 1]}, r"labels\[0\] is a string"),
        ("group", {"documents": TEXTS, "labels": [0, math.inf]}, r"labels\[1\] is inf"),
        ("preference_chats", {**PAIR, "prompt": "three?"}, r"prompt is outside the complete chat.*`unused: \[prompt\]`"),
        ("preference_chats", {**PAIR, "prompt": [ASK]}, "prompt is outside the complete chat"),
        ("preference_chats", {**PAIR, "messages": [SYSTEM, ASK, FIVE]}, "messages is outside the complete chat"),
        ("preference_chats", {"chosen": "four", "rejected": "five"}, "chosen is a text without turns"),
        ("preference_chats", {"chosen": f"{HH} a", "rejected": HH}, "rejected, turn 4 is empty"),
        ("preference_chats", {"chosen": 4, "rejected": "five"}, "chosen is a number, not a list of messages"),
        ("preference_turns", {"conversations": [HUMAN, GPT], "chosen": GPT, "rejected": GPT5},
         r"conversations\[1\].value is an answer"),
        ("preference_messages", {"messages": [ASK, FOUR], "rejected_response": "a", "rejected_messages": [FIVE]},
         "two rejected answers; keep one"),
        ("preference_instruction", {"instruction": " ", "chosen": "four", "rejected": "five"}, "instruction is empty"),
        ("kto", {"messages": [ASK, FOUR], "label": None}, "there is no judgment"),
        ("kto", {"messages": [ASK, FOUR], "label": 0.5}, "label is .*, not true or false"),
        ("kto", {"text": "four", "label": True}, "there is no chat beside the judgment"),
        ("kto", {"messages": [ASK, {**FOUR, "content": ""}], "label": True}, r"messages\[1\].content is empty"),
        ("kto", {"messages": [ASK, FOUR, ASK], "label": True}, "no turn of the answer is learned"),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_used_have_a_reason(format: str, row: dict[str, Any], reason: str) -> None:
    with pytest.raises(RowError, match=reason):
        FORMATS[format].read(row, LearnConfig())


def test_the_format_of_a_source_is_that_of_most_rows() -> None:
    assert detect_format([{"odd": 1}, {"text": "a"}, {"text": "b"}], "a.jsonl") is FORMATS["text"]


@pytest.mark.parametrize(
    ("row", "advice"),
    [
        ({"conversation": [{"role": "user", "content": "a"}]}, "columns: {conversation: messages}"),
        ({"messages": [{"from": "human", "value": "a"}]}, "columns: {messages: conversations}"),
        ({"question": "a", "response": "b"}, "columns: {question: prompt, response: completion}"),
        ({"content": "a", "id": 1}, "columns: {content: text}"),
        ({"prompt": [{"role": "user", "content": "a"}], "answer": "b"}, "columns: {answer: completion}"),
    ],
)
def test_unknown_rows_get_a_hint_at_columns(row: dict[str, Any], advice: str) -> None:
    with pytest.raises(DataError) as caught:
        detect_format([row], "a.jsonl")
    assert advice in str(caught.value)
    assert "prompt_completion: prompt, completion" in str(caught.value)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"question": "a", "answer": "b", "id": 1}, {"prompt": "a", "completion": "b", "id": 1}),
        ({"prompt": "a", "response": "b"}, {"prompt": "a", "completion": "b"}),
        ({"prompt": "a", "completion": "b", "response": "c"}, {"prompt": "a", "completion": "b", "response": "c"}),
    ],
)
def test_common_pairs_of_columns_are_prompt_and_completion(tmp_path, row, expected) -> None:
    source = open_source(SourceConfig(path=str(write_jsonl(tmp_path / "a.jsonl", [row]))))
    assert [read.value for read in source.rows()] == [expected]
    assert source.format() is FORMATS["prompt_completion"]


def test_a_list_of_rejected_answers_is_named_with_the_way_to_write_them(tmp_path) -> None:
    file = write_jsonl(tmp_path / "pairs.jsonl", [{"prompt": "two?", "chosen": "four", "rejected": ["five", "six"]}])
    with pytest.raises(DataError, match=r"`rejected` is a list, .*a row for each answer"):
        open_source(SourceConfig(path=str(file))).format()
