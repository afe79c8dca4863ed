"""Mismatched twins of judged answers: the prompt of a row with the answer of another row."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rows import write_jsonl
from transformers import AutoTokenizer

from fxtune.data.batches.build import plan_training
from fxtune.data.config import DataConfig, OnLong, SourceConfig
from fxtune.data.tokenized.mismatched import with_mismatched
from fxtune.data.tokenized.table import TokenTable
from fxtune.data.tokenized.tokenize import tokenize
from fxtune.errors import DataError
from fxtune.system.files.hub import locate

TOKENIZER = AutoTokenizer.from_pretrained(locate("builtin:tiny").folder)


def table_of(answers: list[str], question: str = "Question", **settings) -> TokenTable:
    rows = [
        {"prompt": f"{question} {number}?", "completion": f" {answer}", "label": number % 2 == 0}
        for number, answer in enumerate(answers)
    ]
    write_jsonl(Path("rows.jsonl"), rows)
    data = DataConfig(sources=[SourceConfig(path="rows.jsonl")], cache_dir="cache", **settings)
    return tokenize(data.sources[0], data, TOKENIZER, None, False)


def parts(table: TokenTable, document: int) -> tuple[list[int], list[int]]:
    """(the prompt, the answer)"""
    begin, end = table.offsets[document], table.offsets[document + 1]
    marks = table.supervised[begin:end]
    first = int(np.argmax(marks))
    assert marks[first:].all()
    return table.ids[begin : begin + first].tolist(), table.ids[begin + first : end].tolist()


@settings(max_examples=20, deadline=None)
@given(answers=st.lists(st.sampled_from(["red", "red lamp", "a blue table"]), min_size=2, max_size=12))
def test_each_answer_has_a_twin_with_its_prompt_and_another_answer(answers, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patches:
        patches.chdir(tmp_path_factory.mktemp("rows"))
        table = table_of(answers)
        if len(set(answers)) == 1:
            with pytest.raises(DataError, match="all answers are the same"):
                with_mismatched(table)
            return
        found = with_mismatched(table)
        assert np.diff(found.groups).tolist() == [2] * len(table)
        every = [parts(table, number)[1] for number in range(len(table))]
        for number in range(len(table)):
            assert parts(found, 2 * number) == parts(table, number)
            prompt, answer = parts(found, 2 * number + 1)
            assert prompt == parts(table, number)[0]
            assert answer != every[number]
            assert answer in every
        assert found.labels[::2].tolist() == table.labels.tolist()
        assert np.isnan(found.labels[1::2]).all()
        assert found.prompts[::2].tolist() == found.prompts[1::2].tolist() == table.prompts.tolist()
        assert found.digests[::2].tolist() == found.digests[1::2].tolist() == table.digests.tolist()
        assert with_mismatched(table).fingerprint == found.fingerprint


def test_twins_come_from_the_cache(cwd):
    table = table_of(["one", "two", "three"])
    found = with_mismatched(table)
    before = (found.folder / "ids.npy").stat().st_mtime_ns
    assert (with_mismatched(table).folder / "ids.npy").stat().st_mtime_ns == before
    assert len(found.by_row) == len(table)
    assert json.loads((found.folder / "table.json").read_text())["format"] == "kto"


@pytest.mark.parametrize("packing", [True, False])
def test_a_prompt_is_shortened_for_both_answers(packing, cwd):
    """Each answer fits a row with its prompt. With another row's longer answer it does not, and packed rows need room
    for both. The answer of the last row fits no row at all, and is nobody's mismatched answer."""
    answers, question = ["red", "a blue " * 20, "two lamps", "blue " * 200], "one two three " * 10
    whole = table_of(answers, question)
    both = np.diff(with_mismatched(whole).offsets).reshape(-1, 2)
    length = int((both.sum(1) if packing else both.max(1))[1] - 6)
    options = dict(sequence_length=length, on_long=OnLong.truncate, packing=packing)
    assert len(parts(whole, 3)[1]) > length
    found = with_mismatched(table_of(answers, question, **options), length, packing)
    sizes = np.diff(found.offsets).reshape(-1, 2)
    assert (sizes.sum(1) if packing else sizes.max(1)).max() <= length
    every = [parts(whole, number) for number in range(len(whole))]
    for number, twin in ((0, 1), (1, 2), (2, 0)):
        prompt, answer = parts(found, 2 * number)
        other_prompt, other = parts(found, 2 * number + 1)
        assert prompt == other_prompt == every[number][0][len(every[number][0]) - len(prompt) :]
        assert (answer, other) == (every[number][1], every[twin][1])
    cut = [len(every[number][0]) - len(parts(found, 2 * number)[0]) for number in range(3)]
    assert (found.split.dropped, found.split.truncated) == (1, sum(lost > 0 for lost in cut))
    assert found.split.lost_tokens == sum(cut) >= 3
    assert set(found.prompts) < set(whole.prompts), "a prompt is held out whatever its row's length"
    data = DataConfig(sources=[SourceConfig(path="rows.jsonl")], **options)
    plan = plan_training([found], data, micro_batch_size=2, global_batch_size=2)
    assert plan.summary()["documents"] == 3


def test_rows_without_room_for_both_answers_are_refused(cwd):
    table = table_of(["a blue " * 15, "two lamps " * 15], sequence_length=50, on_long=OnLong.truncate)
    with pytest.raises(DataError, match=r"the mismatched answer of objective=kto.*sequence_length=50\. Raise it"):
        with_mismatched(table, 50)


def test_a_mismatched_answer_is_an_answer_to_another_prompt(cwd):
    """Rows of one prompt often stand together. If all rows have one prompt, only the answers differ."""
    numbers, answers = [0, 0, 1, 1, 2, 0], ["red", "blue", "red", "blue", "red", "two"]
    rows = [
        {"prompt": f"Question {number}?", "completion": f" {answer}", "label": answer == "red"}
        for number, answer in zip(numbers, answers, strict=True)
    ]
    write_jsonl(Path("rows.jsonl"), rows)
    data = DataConfig(sources=[SourceConfig(path="rows.jsonl")], cache_dir="cache")
    table = tokenize(data.sources[0], data, TOKENIZER, None, False)
    found = with_mismatched(table)
    twins = [parts(found, 2 * row + 1)[1] for row in range(len(rows))]
    every = [parts(table, row)[1] for row in range(len(rows))]
    assert twins == [every[row] for row in (3, 2, 5, 4, 5, 2)]

    write_jsonl(Path("rows.jsonl"), [{**row, "prompt": "Say it."} for row in rows])
    table = tokenize(data.sources[0], data, TOKENIZER, None, False)
    found = with_mismatched(table)
    every = [parts(table, row)[1] for row in range(len(rows))]
    assert all(parts(found, 2 * row + 1)[1] in every for row in range(len(rows)))
    assert all(parts(found, 2 * row + 1)[1] != every[row] for row in range(len(rows)))
