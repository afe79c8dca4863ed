"""A source of rows: every kind of file gives the same rows, limits, renamed columns and content keys."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.rows import CHATS, values, write_jsonl

from fxtune.data.config import SourceConfig, TextUnit
from fxtune.data.formats.registry import FORMATS
from fxtune.data.read import sources
from fxtune.data.read.sources import open_source
from fxtune.errors import DataError


def test_every_kind_of_file_gives_the_same_rows(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", CHATS)
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in CHATS)
    (tmp_path / "a.json").write_text(json.dumps(CHATS, indent=2))
    (tmp_path / "within.json").write_text(
        json.dumps({"version": [1, 2], "made": {"by": "us"}, "data": CHATS, "n": 12})
    )
    write_jsonl(tmp_path / "really_jsonl.json", CHATS)
    pq.write_table(pa.Table.from_pylist(CHATS), tmp_path / "a.parquet", row_group_size=3)
    for name in ("a.jsonl", "a.jsonl.gz", "a.json", "within.json", "really_jsonl.json", "a.parquet"):
        assert values(tmp_path / name) == CHATS, name
        assert open_source(SourceConfig(path=str(tmp_path / name))).format() is FORMATS["messages"]


def test_limit_counts_rows_across_files_and_reads_no_further(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", CHATS[:2])
    (tmp_path / "b.jsonl").write_text("\n" + json.dumps(CHATS[2]) + "\n\n" + json.dumps(CHATS[3]) + "\nbroken")
    assert values(tmp_path, limit=4) == CHATS[:4]
    assert open_source(SourceConfig(path=str(tmp_path), limit=2)).size == (tmp_path / "a.jsonl").stat().st_size
    with gzip.open(tmp_path / "c.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in CHATS)
    assert [row.value for row in open_source(SourceConfig(path=str(tmp_path), limit=8)).rows()][5:] == CHATS[:3]
    (tmp_path / "t.txt").write_text("a\nb\nc\n")
    assert len(values(tmp_path / "t.txt", text_unit=TextUnit.line, limit=2)) == 2


def test_columns_are_renamed_before_the_format_is_detected(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"question": "q", "prompt": "old", "answer": "a"}])
    source = open_source(
        SourceConfig(path=str(tmp_path / "a.jsonl"), columns={"question": "prompt", "answer": "completion"})
    )
    assert next(source.rows()).value == {"prompt": "q", "completion": "a"}
    assert source.format() is FORMATS["prompt_completion"]
    typo = SourceConfig(path=str(tmp_path / "a.jsonl"), format="prompt_completion", columns={"qestion": "prompt"})
    with pytest.raises(DataError, match=r"renames 'qestion'.*did you mean 'question'"):
        open_source(typo).format()


def test_files_of_a_source_may_differ_where_one_format_reads_them(tmp_path):
    from_value = [{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}]
    write_jsonl(tmp_path / "a.jsonl", [*CHATS, {"odd": 1}])
    write_jsonl(tmp_path / "b.jsonl", from_value)
    write_jsonl(tmp_path / "c.jsonl", [{"odd": 1}, {"text": "a bad row"}, CHATS[0]])
    write_jsonl(tmp_path / "d.jsonl", [{"odd": 1}])
    opened = open_source(SourceConfig(path=str(tmp_path)))
    assert opened.format() is FORMATS["messages"]
    write_jsonl(tmp_path / "e.jsonl", [{"text": "a"}, {"text": "b"}])
    for config in (SourceConfig(path=str(tmp_path)), SourceConfig(path=str(tmp_path), format="messages")):
        with pytest.raises(DataError, match=r"a\.jsonl has the columns of messages and .*e\.jsonl .* text"):
            open_source(config).format()


def test_content_key_depends_only_on_the_used_bytes(tmp_path, monkeypatch):
    path, copy = write_jsonl(tmp_path / "a.jsonl", CHATS), write_jsonl(tmp_path / "other" / "b.jsonl", CHATS)

    def key(path, **config):
        return open_source(SourceConfig(path=str(path), **config)).content_key()

    first = key(path)
    assert first == key(copy)
    monkeypatch.setattr(sources, "SHARD_BYTES", 10)
    assert first == key(path)
    stamp = path.stat().st_mtime_ns
    text = path.read_text()
    path.write_text(text.replace("question 6", "question 7"))  # same size, and the same time below
    __import__("os").utime(path, ns=(stamp, stamp))
    assert key(path) != first
    assert key(path, limit=3) == key(copy, limit=3)
