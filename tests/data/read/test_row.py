"""Rows and their limits: too long, too deep, not Unicode, of another type; and rows collected into shards."""

from __future__ import annotations

import io

import pytest

from fxtune.data.read import row as rows
from fxtune.data.read.row import Reading, Row, bounded_lines, checked_row, row_shards
from fxtune.errors import DataError


def test_unusable_values_are_bad_rows_with_a_reason():
    for value, size, reason in (
        ([1], 1, "the row is a list, not an object"),
        ({"text": "\ud83d"}, 1, "half a surrogate pair"),
        ({"text": "a"}, 100 << 20, r"a row of 100.0 MiB; the limit is 16 MiB"),
    ):
        found = checked_row("a.jsonl:1", value, size, suspicious=True)
        assert found.value is None
        assert reason in str(found.error)
    assert checked_row("a.jsonl:1", {"text": "a"}, 9, suspicious=True) == Row("a.jsonl:1", {"text": "a"}, size=9)


def test_shards_hold_all_rows_in_order_and_end_at_either_limit():
    given = [Row(str(index), {}, size=10) for index in range(7)]
    assert [len(shard.held) for shard in row_shards(given, shard_bytes=30)] == [3, 3, 1]
    shards = list(row_shards(given, shard_bytes=1000, shard_rows=4))
    assert [len(shard.held) for shard in shards] == [4, 3]
    assert [row for shard in shards for row in shard.rows()] == given


def test_renamed_column_replaces_one_that_has_its_name():
    renamed = Reading({"question": "prompt"}).read([Row("1", {"question": "a", "prompt": "b", "id": 1})])
    assert [row.value for row in renamed] == [{"prompt": "a", "id": 1}]


def test_long_lines_are_cut_and_the_next_line_is_whole(monkeypatch):
    monkeypatch.setattr(rows, "MAX_ROW_BYTES", 10)
    monkeypatch.setattr(rows, "MAX_RAW_CHARACTERS", 4)
    lines = list(bounded_lines(io.BytesIO(b"short\n" + b"x" * 25 + b"\nend"), b"\n"))
    assert lines == [(b"short\n", 6), (b"xxxx", 26), (b"end", 3)]


def test_images_do_not_count_as_text(monkeypatch):
    monkeypatch.setattr(rows, "MAX_ROW_BYTES", 100)
    monkeypatch.setattr(rows, "MAX_ROW_BYTES_WITH_IMAGES", 1000)
    uri = "data:image/png;base64," + "A" * 300
    parts = [{"type": "image_url", "image_url": {"url": uri}}, {"type": "text", "text": "What?"}]
    for value in ({"image": uri, "a": 1}, {"images": [uri]}, {"content": parts}, {"images": [{"bytes": b"A" * 300}]}):
        assert checked_row("a:1", value, 400, False, keeps_images=True).value == value
        assert "MiB" in str(checked_row("a:1", value, 400, False).error)
        assert "with its images" in str(checked_row("a:1", value, 1001, False, keeps_images=True).error)
    for value in ({"text": uri}, {"content": [{"type": "text", "text": "x" * 300}], "image": uri}):
        assert "text alone" in str(checked_row("a:1", value, 400, False, keeps_images=True).error)


def test_errors_of_a_disk_name_the_file():
    with (
        pytest.raises(DataError, match=r"rows\.jsonl cannot be read: Input/output error\."),
        rows.reading("rows.jsonl"),
    ):
        raise OSError(5, "Input/output error")
