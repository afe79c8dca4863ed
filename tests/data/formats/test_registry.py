"""Row formats are detected, and unknown rows get a hint."""

import pytest
from support.rows import write_jsonl

from fxtune.data.config import SourceConfig
from fxtune.data.formats.registry import FORMATS, detect_format
from fxtune.data.read.sources import open_source
from fxtune.errors import DataError


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": [{"role": "user", "content": "a"}], "text": "rendered"}, FORMATS["messages"]),
        ({"conversations": [{"from": "human", "value": "a"}]}, FORMATS["sharegpt"]),
        ({"instruction": "a", "input": "", "output": "b", "text": "both"}, FORMATS["alpaca"]),
        ({"prompt": "a", "completion": "b"}, FORMATS["prompt_completion"]),
        (
            {"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]},
            FORMATS["prompt_completion"],
        ),
        ({"input_ids": [1, 2], "labels": [-100, 2], "text": "source"}, FORMATS["tokens"]),
        ({"text": "a", "id": 4}, FORMATS["text"]),
        ({"question": "a", "answer": "b"}, FORMATS["prompt_completion"]),
        ({"prompt": "a", "response": "b"}, FORMATS["prompt_completion"]),
        ({"messages": '[{"role": "user", "content": "a"}]'}, FORMATS["messages"]),
        ({"text": "a", "question": "b", "answer": "c"}, FORMATS["text"]),
    ],
)
def test_formats_are_detected(row, expected):
    assert detect_format([{"odd": 1}, row, row], "a.jsonl") is expected


@pytest.mark.parametrize(
    ("row", "advice"),
    [
        ({"conversation": [{"role": "user", "content": "a"}]}, "columns: {conversation: messages}"),
        ({"messages": [{"from": "human", "value": "a"}]}, "columns: {messages: conversations}"),
        ({"question": "a", "response": "b"}, "columns: {question: prompt, response: completion}"),
        ({"content": "a", "id": 1}, "columns: {content: text}"),
    ],
)
def test_unknown_rows_get_a_hint_at_columns(row, advice):
    with pytest.raises(DataError) as caught:
        detect_format([row], "a.jsonl")
    message = str(caught.value)
    assert advice in message
    assert ", ".join(row) in message
    assert "prompt_completion: prompt, completion" in message


@pytest.mark.parametrize(("row", "expected"), [
    ({"question": "a", "answer": "b", "id": 1}, {"prompt": "a", "completion": "b", "id": 1}),
    ({"prompt": "a", "response": "b"}, {"prompt": "a", "completion": "b"}),
    ({"text": "a", "question": "b", "answer": "c"}, {"text": "a", "question": "b", "answer": "c"}),
    ({"prompt": "a", "completion": "b", "response": "c"}, {"prompt": "a", "completion": "b", "response": "c"}),
])  # fmt: skip
def test_common_pairs_of_columns_are_prompt_and_completion(tmp_path, row, expected):
    source = open_source(SourceConfig(path=str(write_jsonl(tmp_path / "a.jsonl", [row]))))
    assert [read.value for read in source.rows()] == [expected]


def test_a_list_of_rejected_answers_is_named_with_the_way_to_write_them(tmp_path):
    file = tmp_path / "pairs.jsonl"
    write_jsonl(file, [{"prompt": "two?", "chosen": "four", "rejected": ["five", "six"]}])
    with pytest.raises(DataError, match=r"`rejected` is a list, .*a row for each answer"):
        open_source(SourceConfig(path=str(file))).format()
