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

from fxtune.data.config import DataConfig, SourceConfig
from fxtune.data.tokenized.mismatched import with_mismatched
from fxtune.data.tokenized.table import TokenTable
from fxtune.data.tokenized.tokenize import tokenize
from fxtune.errors import DataError
from fxtune.system.hub import locate

TOKENIZER = AutoTokenizer.from_pretrained(locate("builtin:tiny").folder)


def table_of(answers: list[str]) -> TokenTable:
    rows = [
        {"prompt": f"Question {number}?", "completion": f" {answer}", "label": number % 2 == 0}
        for number, answer in enumerate(answers)
    ]
    write_jsonl(Path("rows.jsonl"), rows)
    data = DataConfig(sources=[SourceConfig(path="rows.jsonl")], cache_dir="cache")
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
        assert found.digests[::2].tolist() == found.digests[1::2].tolist() == table.digests.tolist()
        assert with_mismatched(table).fingerprint == found.fingerprint


def test_twins_come_from_the_cache(cwd):
    table = table_of(["one", "two", "three"])
    found = with_mismatched(table)
    before = (found.folder / "ids.npy").stat().st_mtime_ns
    assert (with_mismatched(table).folder / "ids.npy").stat().st_mtime_ns == before
    assert len(found.by_row) == len(table)
    assert json.loads((found.folder / "table.json").read_text())["format"] == "kto"
