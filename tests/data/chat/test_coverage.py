"""What a row holds reaches the text, or is named as unused, or is an error with the field's name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import families
from support.rows import write_jsonl

from fxtune.data.chat.encode import Document, Encoder
from fxtune.data.chat.remarks import CONTENT_REMARK, REASONING_REMARK
from fxtune.data.config import DataConfig, OnBadRow, SourceConfig
from fxtune.data.formats.registry import FORMATS
from fxtune.data.read.sources import open_source
from fxtune.data.tokenized.tokenize import tokenize
from fxtune.errors import DataError

USER = {"role": "user", "content": "what is two and two?"}
ANSWER = {"role": "assistant", "content": "four."}
CALLING = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": "two"}}}]}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": {}}}]


def encode(family: str, row: dict[str, Any], format: str = "messages", unused: tuple[str, ...] = ()) -> Document | str:
    (found,) = Encoder(families.tokenizer(family), FORMATS[format], unused=unused).encode([row])
    return found


@pytest.mark.parametrize(
    ("family", "format", "row", "field", "name"),
    [
        ("chatml", "messages", {"messages": [USER, ANSWER], "tools": TOOLS}, "`tools`", "tools"),
        ("chatml", "messages", {"messages": [USER, {**ANSWER, "reasoning_content": "I add"}]}, "reasoning of messages[1]", "reasoning_content"),
        ("deepseek", "messages", {"messages": [USER, {**ANSWER, "content": "<think>\nI add\n</think>\n\nfour."}]}, "reasoning of messages[1]", "reasoning_content"),
        ("mistral_v3", "messages", {"messages": [{"role": "system", "content": "two"}, USER, ANSWER]}, "messages[0], of role system", "system"),
        ("mistral_v3", "alpaca", {"instruction": "u", "output": "a", "system": "Be kind."}, "messages[0], of role system", "system"),
        ("chatml", "messages", {"messages": [{**USER, "name": "Zoe"}, ANSWER]}, "messages[0].name", "name"),
        ("chatml", "messages", {"messages": [USER, {**ANSWER, "thought": "I add"}]}, "messages[1].thought", "thought"),
        ("chatml", "messages", {"messages": [USER, ANSWER], "documents": ["a b"]}, "column 'documents'", "documents"),
        ("chatml", "alpaca", {"instruction": "u", "output": "a", "context": "c d"}, "column 'context'", "context"),
        ("chatml", "messages", {"messages": [USER, ANSWER], "conversations": [{"from": "human", "value": "other"}]}, "column 'conversations'", "conversations"),
        ("chatml", "messages", {"messages": [USER, ANSWER], "weights": [0, 1]}, "column 'weights'", "weights"),
        ("chatml", "messages", {"messages": [USER, ANSWER], "parts": [{"begin": 0, "train": False}]}, "column 'parts'", "parts"),
        ("chatml", "messages", {"messages": [USER, {**ANSWER, "learned": [True]}]}, "messages[1].learned", "learned"),
        ("chatml", "tokens", {"input_ids": [5, 6], "supervised": [0, 1]}, "column 'supervised'", "supervised"),
        ("chatml", "messages", {"messages": [USER, ANSWER], "prompt": "Context."}, "column 'prompt'", "prompt"),
        ("chatml", "messages", {"messages": [USER, ANSWER], "prompt": [{"role": "user", "content": "Else?"}]}, "column 'prompt'", "prompt"),
        ("chatml", "messages", {"messages": [USER, ANSWER], "text": "User: what is two and two?"}, "column 'text'", "text"),
        ("chatml", "alpaca", {"instruction": "u", "output": "a", "text": "other"}, "column 'text'", "text"),
        ("chatml", "prompt_completion", {"prompt": "p", "completion": "c", "system": "Be kind."}, "column 'system'", "system"),
        ("chatml", "text", {"text": "two", "summary": "it is"}, "column 'summary'", "summary"),
        ("chatml", "tokens", {"input_ids": [5, 6], "reward_model": {"a": "b"}}, "column 'reward_model'", "reward_model"),
    ],
)  # fmt: skip
def test_a_field_that_is_not_written_is_a_bad_row(family: str, format: str, row: Any, field: str, name: str) -> None:
    reason = encode(family, row, format)
    assert isinstance(reason, str)
    assert field in reason
    assert f"`unused: [{name}]`" in reason
    found = encode(family, row, format, unused=(name,))
    assert isinstance(found, Document), found


def test_calls_need_a_template_that_writes_them() -> None:
    reason = encode("chatml", {"messages": [USER, CALLING]})
    assert reason == (
        "the chat template writes no tool calls, as messages[1] has; name one that does in data.chat_template=FILE"
    )


@pytest.mark.parametrize("prompt", [USER["content"], [USER], "", None])
def test_a_prompt_or_a_text_that_repeats_the_chat_is_no_error(prompt: Any) -> None:
    row = {"messages": [USER, ANSWER], "prompt": prompt, "text": "Q: what is two and two?\nA: four. <end>"}
    assert isinstance(encode("chatml", row), Document)


def test_empty_and_known_fields_are_no_error() -> None:
    row = {
        "messages": [{**USER, "id": 7, "timestamp": "2024"}, {**ANSWER, "refusal": None, "notes": "", "links_to": []}],
        "tools": [], "id": "x1", "source": "web", "score": 0.5, "summary": None, "facts": {"a": [""]}, "documents": [],
        "first": "what is two and two?", "chat": [{"said": "four."}],
    }  # fmt: skip
    assert isinstance(encode("chatml", row), Document)


def test_books_of_the_long_context_recipes_are_read() -> None:
    """emozilla/pg19, which two recipes name."""
    row = {"short_book_title": "A Book", "publication_date": 1900, "url": "http://a.b/c", "text": "two and two"}
    assert isinstance(encode("chatml", row, "text"), Document)


def test_what_a_template_leaves_out_by_design_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    early = {"messages": [USER, {**ANSWER, "reasoning_content": "I add"}, USER, ANSWER]}
    early["messages"][1]["train"] = False  # a learned one would be a document of its own (test_reasoning.py)
    assert REASONING_REMARK in encode("qwen3", early).remarks
    thought = {"messages": [USER, {**ANSWER, "content": "<think>\nI add\n</think>\n\nfour."}, USER, ANSWER]}
    thought["messages"][1]["train"] = False
    assert REASONING_REMARK in encode("qwen3", thought).remarks
    beside = {"messages": [USER, {**CALLING, "content": "let me see"}]}
    for family in ("llama31", "mistral_v3", "hermes"):
        assert encode(family, beside).remarks == (CONTENT_REMARK,)
    assert CONTENT_REMARK not in encode("qwen3", beside).remarks
    last = {"messages": [USER, {**ANSWER, "reasoning_content": "I add"}]}
    path = write_jsonl(tmp_path / "a.jsonl", [early, thought, last])
    data = DataConfig(cache_dir=str(tmp_path), workers=1)
    for _ in range(2):  # tokenized, and from the cache
        remarks = tokenize(SourceConfig(path=str(path)), data, families.tokenizer("qwen3")).remarks
        assert remarks[REASONING_REMARK] == 2
        assert f"{REASONING_REMARK} (2 of 3 documents)." in capsys.readouterr().out


CHOSEN = [USER, ANSWER]
REJECTED = [USER, {"role": "assistant", "content": "five."}]


@pytest.mark.parametrize(
    ("row", "format", "columns", "way"),
    [
        ({"messages": CHOSEN, "chosen": CHOSEN, "rejected": REJECTED}, "messages", "chosen, rejected", "dpo, and the source's `format: preference_chats`"),
        ({"question": "two?", "response_chosen": "four", "response_rejected": "five"}, "auto", "response_chosen, response_rejected", "`columns`), and set objective=dpo"),
        ({"chosen": "four", "rejected": "five"}, "auto", "chosen, rejected", "`prompt`, `chosen` and `rejected`"),
        ({"prompt": "two?", "completion": "five", "label": False}, "prompt_completion", "label", "kto, and the source's `format: kto`"),
        ({"messages": REJECTED, "kto_tag": False}, "messages", "kto_tag", "objective=kto"),
    ],
)  # fmt: skip
def test_preferences_are_refused_as_rows_of_another_format(
    row: Any, format: str, columns: str, way: str, tmp_path: Path
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [row] * 3)
    for on_bad_row in OnBadRow:
        data = DataConfig(cache_dir=str(tmp_path), workers=1, on_bad_row=on_bad_row)
        source = SourceConfig(path=str(path), format=format)
        with pytest.raises(DataError, match=rf"a row of preferences \({columns}\)") as raised:
            tokenize(source, data, families.tokenizer("chatml"), progress=False)
        assert way in str(raised.value)
        assert "Perhaps" not in str(raised.value)
        assert "unused" not in str(raised.value)


def test_answers_of_preferences_that_are_unused_leave_supervised_rows(tmp_path: Path) -> None:
    row = {"messages": CHOSEN, "chosen": CHOSEN, "rejected": REJECTED, "score_chosen": 8.0}
    path = write_jsonl(tmp_path / "a.jsonl", [row])
    data = DataConfig(cache_dir=str(tmp_path), workers=1)
    source = SourceConfig(path=str(path), unused=["chosen", "rejected", "score_chosen"])
    table = tokenize(source, data, families.tokenizer("chatml"), progress=False)
    assert (table.format.name, len(table)) == ("messages", 1)


def test_all_columns_that_are_not_read_are_named_at_once() -> None:
    row = {"messages": [USER, ANSWER], "facts": "two is even", "language": "x", "notes": ["none"]}
    reason = encode("chatml", row, "messages")
    assert "columns 'facts', 'notes' are not read" in reason
    assert "`unused: [facts, notes]`" in reason


def test_columns_that_describe_an_answer_need_no_entry(tmp_path: Path) -> None:
    described = {"chosen-rating": 5, "rejected_model": "m", "chosen_avg_rating": 4}
    row = {"prompt": "two? ", "chosen": "four", "rejected": "five"}
    for name, value in described.items():
        reason = "column 'chosen_avg_rating' is not read" if name == "chosen_avg_rating" else None
        (found,) = Encoder(families.tokenizer("chatml"), FORMATS["preference"]).encode([{**row, name: value}])
        assert reason in found if isinstance(found, str) and reason else not isinstance(found, str)


def test_preferences_after_the_first_rows_are_bad_rows() -> None:
    reason = encode("chatml", {"prompt": "two?", "completion": "five", "label": False}, "prompt_completion")
    assert "a row of preferences (label)" in reason


def test_other_rows_among_pairs_are_bad_rows_with_their_line(tmp_path: Path) -> None:
    pair = {"prompt": "two? ", "chosen": "four", "rejected": "five"}
    broken = [{"messages": CHOSEN}, {"chosen": "four", "rejected": "five"}, {"prompt": "two? ", "chosen": "four"}]
    for row, missing in zip(broken, ("prompt", "prompt", "rejected"), strict=True):
        path = write_jsonl(tmp_path / "a.jsonl", [pair, row])
        data = DataConfig(cache_dir=str(tmp_path), workers=1)
        with pytest.raises(DataError, match=rf"a\.jsonl:2: there is no {missing}"):
            tokenize(SourceConfig(path=str(path)), data, families.tokenizer("chatml"), progress=False)


def test_classes_are_no_preferences(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "two", "label": 1}])
    assert open_source(SourceConfig(path=str(path))).format() is FORMATS["text"]
    reason = encode("chatml", json.loads(path.read_text()), "text")
    assert "column 'label' is not read (the value is 1;" in reason


@pytest.mark.parametrize("place", ["column", "turn", "variable"])
def test_a_reason_does_not_repeat_a_name_of_thousands_of_letters(place: str) -> None:
    name = "x" * 10_000
    row: dict[str, Any] = {"messages": [dict(USER), dict(ANSWER)]}
    {"column": row, "turn": row["messages"][1], "variable": row.setdefault("chat_template_kwargs", {})}[place][
        name
    ] = "z"
    (reason,) = Encoder(families.tokenizer("qwen3"), FORMATS["messages"]).encode([row])
    assert isinstance(reason, str)
    assert len(reason) < 500
