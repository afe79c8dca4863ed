"""JSON arrays: every row with its number, and files that are broken, too large for the window or no array."""

import json

import pytest
from support.rows import CHATS, values

from fxtune.data.config import SourceConfig
from fxtune.data.read.sources import open_source
from fxtune.errors import DataError


def test_json_file_with_one_row_gives_one_row(tmp_path):
    (tmp_path / "one.json").write_text(json.dumps(CHATS[0]))
    assert values(tmp_path / "one.json") == CHATS[:1]


def test_broken_json_array_error_names_the_row(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('[\n {"text": "a"},\n "b",\n {"text": "\\ud800"},\n {"text" "c"}\n]')
    rows = open_source(SourceConfig(path=str(path))).rows()
    with pytest.raises(DataError, match=r"a\.json: not JSON after row 3 \(Expecting ':' delimiter\)"):
        list(rows)
    path.write_text('[\n {"text": "a"},\n "b",\n {"text": "\\ud800"},\n {"text": "c"}\n]')
    assert [(row.where[-6:], row.error is None) for row in open_source(SourceConfig(path=str(path))).rows()] == [
        (" row 1", True),
        (" row 2", False),
        (" row 3", False),
        (" row 4", True),
    ]
    for more in ("[]", "x", " " * 70_000 + '{"text": "b"}'):
        path.write_text('[{"text": "a"}]\n' + more)
        with pytest.raises(DataError, match=r"a\.json: not JSON after row 1 \(.* after the end"):
            values(path)
    path.write_text('[{"text": "a"}')
    with pytest.raises(DataError, match="ends too early"):
        values(path)
    path.write_text('{"a": [{"text": "a"}], "b": [{"text": "b"}]}')
    with pytest.raises(DataError, match="two lists of rows, 'a' and 'b'"):
        values(path)
    path.write_text('{"a": 1,\n "b": "x"}')
    with pytest.raises(DataError, match="without a list of rows"):
        values(path)


def test_json_array_larger_than_the_window_is_complete(tmp_path):
    rows = [{"text": "x" * (1 << at), "n": at} for at in range(19)] * 2
    (tmp_path / "a.json").write_text(json.dumps(rows))
    assert values(tmp_path / "a.json") == rows
