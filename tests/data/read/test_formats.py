"""Row formats are detected, and unknown rows get a hint."""

import pytest

from fxtune.data.read.formats import RowFormat, detect_format
from fxtune.errors import DataError


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": [{"role": "user", "content": "a"}], "text": "rendered"}, RowFormat.messages),
        ({"conversations": [{"from": "human", "value": "a"}]}, RowFormat.sharegpt),
        ({"instruction": "a", "input": "", "output": "b", "text": "both"}, RowFormat.alpaca),
        ({"prompt": "a", "completion": "b"}, RowFormat.prompt_completion),
        (
            {"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]},
            RowFormat.prompt_completion,
        ),
        ({"input_ids": [1, 2], "labels": [-100, 2], "text": "source"}, RowFormat.tokens),
        ({"text": "a", "id": 4}, RowFormat.text),
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
