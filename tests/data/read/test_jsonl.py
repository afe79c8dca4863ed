"""JSONL files: bad lines with their reason, and shards that give the lines of the file."""

import gzip
import json
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.rows import values, write_jsonl

from fxtune.data.config import SourceConfig
from fxtune.data.read import sources
from fxtune.data.read.jsonl import LineShard, line_shards
from fxtune.data.read.row import Reading
from fxtune.data.read.sources import open_source
from fxtune.errors import DataError


def test_unreadable_row_has_line_and_reason(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"text": "bom"}\r\n\n  \n{"text": \n[1]\n{"text": "\\ud83d"}\n{"text": "\\ud83d\\ude00"}\n'
        b'{"text": "\xff"}\n' + b"[" * 100_000 + b'\n{"text": "end"}'
    )
    found = {row.where.rpartition(":")[2]: row for row in open_source(SourceConfig(path=str(path))).rows()}
    assert {at for at, row in found.items() if row.error is None} == {"1", "7", "10"}
    assert found["7"].value == {"text": "😀"}
    assert found["4"].error == "not JSON (Expecting value, column 10)", "not column 1 of the line after it"
    assert found["4"].raw == '{"text": '
    assert "a list, not an object" in found["5"].error
    assert "surrogate" in found["6"].error
    assert "byte 11 of the line is not UTF-8" in found["8"].error
    assert "cannot be read as JSON" in found["9"].error


def test_a_comma_after_a_row_is_named(tmp_path):
    path = tmp_path / "array.jsonl"
    path.write_text('{"text": "one"},\n{"text": "two"}\n')
    first, second = open_source(SourceConfig(path=str(path))).rows()
    assert "a comma follows the row" in first.error
    assert second.value == {"text": "two"}


@settings(max_examples=30, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.one_of(st.just(""), st.just("   "), st.text(alphabet='ab"\\é\u2028 ', max_size=40)), min_size=1),
    st.integers(1, 60),
    st.booleans(),
    st.sampled_from(["\n", "\r\n"]),
)
def test_shards_of_any_size_give_the_lines_of_the_file(tmp_path, texts, shard_bytes, last_newline, newline):
    """Each line that is not blank is read once, in order, with its line number, wherever the file is cut."""
    body = newline.join(json.dumps({"text": text}, ensure_ascii=False) if text.strip(" ") else text for text in texts)
    path = tmp_path / "a.jsonl"
    path.write_bytes((body + newline * last_newline).encode())
    shards = list(line_shards(path, "a.jsonl", path.stat().st_size, shard_bytes, Reading()))
    assert [(row.where, row.value["text"]) for shard in shards for row in shard.rows()] == [
        (f"a.jsonl:{number}", text) for number, text in enumerate(texts, 1) if text.strip(" ")
    ]
    assert [shard.start for shard in shards[1:]] == [shard.end for shard in shards[:-1]]


def test_large_files_are_cut_into_shards_for_workers(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "SHARD_BYTES", 256)
    draw = random.Random(1)
    rows = [{"text": "w" * draw.randint(0, 90)} for _ in range(200)]
    source = open_source(SourceConfig(path=str(write_jsonl(tmp_path / "a.jsonl", rows))))
    shards = list(source.shards())
    assert len(shards) > 20
    assert all(isinstance(shard, LineShard) and shard.size < 500 for shard in shards)
    assert [row.value for shard in shards for row in shard.rows()] == rows


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_row_with_a_key_twice_is_a_bad_row(tmp_path, name):
    rows = [
        '{"text": "a"}',
        '{"text": "lost", "text": "kept"}',
        '{"text": "b", "meta": [{"x": 1, "x": 2}]}',
        '{"text": "c"}',
    ]
    path = tmp_path / name
    path.write_text("\n".join(rows) if name.endswith("l") else "[" + ",\n".join(rows) + "]")
    found = list(open_source(SourceConfig(path=str(path))).rows())
    assert [row.value and row.value["text"] for row in found] == ["a", None, None, "c"]
    assert [row.where[-1] for row in found] == ["1", "2", "3", "4"]
    assert "'text' twice" in found[1].error
    assert "'x' twice" in found[2].error


def test_gzip_with_another_name_is_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(gzip.compress(b'{"text": "a"}\n'))
    with pytest.raises(DataError, match="gzip") as caught:
        open_source(SourceConfig(path=str(path)))
    assert "a.jsonl.gz" in str(caught.value)


def test_gzip_in_gzip_is_named(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(gzip.compress(b'{"text": "a"}\n')))
    with pytest.raises(DataError, match=r"a\.jsonl\.gz .* twice"):
        values(path)
