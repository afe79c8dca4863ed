"""The files that a path means: folders, globs, builtin data, and paths that do not exist."""

import gzip

import pytest
from support.rows import CHATS, values, write_jsonl

from fxtune.data.config import SourceConfig
from fxtune.data.read.sources import open_source
from fxtune.errors import DataError


def test_folders_and_globs_are_sorted_and_skip_the_dataset_card(tmp_path):
    for at, name in enumerate(["b/2.jsonl", "a/1.jsonl", "c.jsonl", ".cache/x.jsonl"]):
        write_jsonl(tmp_path / name, [{"text": str(at)}])
    (tmp_path / "README.md").write_text("# card")
    (tmp_path / "image.png").write_bytes(b"no")
    assert [row["text"] for row in values(tmp_path)] == ["1", "0", "2"]
    assert [row["text"] for row in values(tmp_path / "**" / "*.jsonl")] == ["1", "0", "2"]
    assert [row["text"] for row in values(tmp_path / "[ab]" / "?.jsonl")] == ["1", "0"]
    (tmp_path / "d.csv").write_text("text\nx\n")
    with pytest.raises(
        DataError,
        match=r"several kinds \(jsonl: 1\.jsonl and 2 more; csv: d\.csv\).*data\.sources=\[.*\*\.jsonl.*\*\.csv",
    ):
        open_source(SourceConfig(path=str(tmp_path)))


def test_missing_local_path_is_an_error_without_asking_the_hub(tmp_path, monkeypatch):
    write_jsonl(tmp_path / "data" / "train.jsonl", CHATS)
    monkeypatch.chdir(tmp_path)
    for path, near in {
        "data/trian.jsonl": "data/train.jsonl",
        "dta/train.jsonl": "data",
        "data/trian": "data/train.jsonl",
        "./dat": "data",
        str(tmp_path / "data" / "train.jso"): "data/train.jsonl",
        "data/tra*.json": "data/train.jsonl",
    }.items():
        with pytest.raises(DataError) as caught:
            open_source(SourceConfig(path=path))
        assert "hub" not in str(caught.value)
        assert str(tmp_path / near) in str(caught.value), caught.value


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"", "is empty"),
        ("a.jsonl", b"\n \n", "has no rows"),
        ("a.csv", b"text\n", "has no rows"),
        ("a.json", b"[]", "has no rows"),
        ("a.json", b"12", "begins with '1'"),
        ("a.csv", b"text,text\n1,2\n", "names a column twice: text"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "abc"}\n' * 9, mtime=0)[:-12], "cannot be read past here"),
        ("a.xlsx", b"PK", "no file that fxtune reads"),
        ("folder/", b"", "empty folder"),
    ],
)
def test_files_without_usable_content(tmp_path, name, content, message):
    if name.endswith("/"):
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        open_source(SourceConfig(path=str(tmp_path / name))).format()


def test_unknown_builtin_data_is_an_error():
    with pytest.raises(DataError, match="builtin:nothing does not ship with fxtune"):
        open_source(SourceConfig(path="builtin:nothing"))
