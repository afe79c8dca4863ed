"""The row of each document, without those that could not be used."""

from __future__ import annotations

from support.rows import numbered_chat, write_jsonl

from fxtune.data.config import DataConfig, OnBadRow, SourceConfig
from fxtune.data.tokenized.rows import usable_rows


def test_rows_that_could_not_be_used_have_no_document(table_of, tmp_path):
    rows = [numbered_chat(0), "broken", numbered_chat(1), {"messages": []}, numbered_chat(2)]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    table = table_of(path, on_bad_row=OnBadRow.quarantine)
    found = list(usable_rows(SourceConfig(path=str(path)), table, DataConfig()))
    assert [row.where.rpartition(":")[2] for row in found] == ["1", "3", "5"]
    assert len(found) == len(table)
