"""Sources as users have them: real files of every kind, and what is said about the broken ones."""

import csv
import gzip
import json
import random
import shutil
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fxtune.data.config import SourceConfig, TextUnit
from fxtune.data.read import sources
from fxtune.data.read.formats import RowFormat, detect_format
from fxtune.data.read.jsonl import LineShard, line_shards
from fxtune.data.read.sources import open_source
from fxtune.errors import ConfigError, DataError

CHATS = [
    {"messages": [{"role": "user", "content": f"question {i} é"}, {"role": "assistant", "content": "yes"}]}
    for i in range(7)
]


def lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def values(path, **config):
    found = list(open_source(SourceConfig(path=str(path), **config)).rows())
    assert all(row.error is None for row in found), found
    return [row.value for row in found]


def places(path, **config):
    return [row.where.removeprefix(str(path)) for row in open_source(SourceConfig(path=str(path), **config)).rows()]


def test_the_same_rows_come_from_every_kind_of_file(tmp_path):
    lines(tmp_path / "a.jsonl", CHATS)
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in CHATS)
    (tmp_path / "a.json").write_text(json.dumps(CHATS, indent=2))
    (tmp_path / "within.json").write_text(
        json.dumps({"version": [1, 2], "made": {"by": "us"}, "data": CHATS, "n": 12})
    )
    lines(tmp_path / "really_jsonl.json", CHATS)
    pq.write_table(pa.Table.from_pylist(CHATS), tmp_path / "a.parquet", row_group_size=3)
    for name in ("a.jsonl", "a.jsonl.gz", "a.json", "within.json", "really_jsonl.json", "a.parquet"):
        assert values(tmp_path / name) == CHATS, name
        assert open_source(SourceConfig(path=str(tmp_path / name))).format() is RowFormat.messages


def test_one_row_in_a_json_file_is_a_row_and_not_a_list_of_turns(tmp_path):
    (tmp_path / "one.json").write_text(json.dumps(CHATS[0]))
    assert values(tmp_path / "one.json") == CHATS[:1]


def test_csv_cells_stay_text_and_know_their_line(tmp_path):
    with open(tmp_path / "a.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([["instruction", "output"], ["add 1,\nthen 2", "003"], ["x", ""], ["NA", "null"]])
    assert values(tmp_path / "a.csv") == [
        {"instruction": "add 1,\nthen 2", "output": "003"},
        {"instruction": "x", "output": ""},
        {"instruction": "NA", "output": "null"},
    ]
    assert places(tmp_path / "a.csv") == [":2", ":4", ":5"]
    assert open_source(SourceConfig(path=str(tmp_path / "a.csv"))).format() is RowFormat.alpaca
    (tmp_path / "b.csv").write_text("prompt;completion\na,b;c\nonly one\n")
    good, short = open_source(SourceConfig(path=str(tmp_path / "b.csv"))).rows()
    assert good.value == {"prompt": "a,b", "completion": "c"}
    assert short.value is None
    assert short.where.endswith("b.csv:3")
    assert "1 cells under a header of 2 columns" in short.error
    assert short.raw == ["only one"]


def test_parquet_rows_lose_the_nulls_that_arrow_put_in(tmp_path):
    rows = [
        {
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]},
            ]
        },
        {"messages": [{"role": "user", "content": "b"}], "tools": ["t"]},
    ]
    pq.write_table(
        pa.Table.from_pylist(
            rows,
            schema=pa.schema(
                {
                    "messages": pa.list_(
                        pa.struct(
                            {
                                "role": pa.string(),
                                "content": pa.string(),
                                "tool_calls": pa.list_(pa.struct({"name": pa.string()})),
                            }
                        )
                    ),
                    "tools": pa.list_(pa.string()),
                }
            ),
        ),
        tmp_path / "a.parquet",
    )
    assert values(tmp_path / "a.parquet") == rows
    assert places(tmp_path / "a.parquet") == [" row 1", " row 2"]
    (tmp_path / "a.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-20])
    with pytest.raises(DataError, match=r"a\.parquet cannot be read as Parquet.*Is the file complete"):
        values(tmp_path / "a.parquet")


def test_text_is_documents_paragraphs_or_lines(tmp_path):
    (tmp_path / "a.md").write_text("\n# one\nmore\n\n\ntwo\n")
    assert values(tmp_path / "a.md") == [{"text": "\n# one\nmore\n\n\ntwo\n"}]
    assert values(tmp_path / "a.md", text_unit=TextUnit.paragraph) == [{"text": "# one\nmore"}, {"text": "two"}]
    assert places(tmp_path / "a.md", text_unit=TextUnit.paragraph) == [":2", ":6"]
    assert [row["text"] for row in values(tmp_path / "a.md", text_unit=TextUnit.line)] == ["# one", "more", "two"]
    assert places(tmp_path / "a.md", text_unit=TextUnit.line) == [":2", ":3", ":6"]


def test_folders_and_globs_are_read_in_order_and_skip_a_datasets_card(tmp_path):
    for at, name in enumerate(["b/2.jsonl", "a/1.jsonl", "c.jsonl", ".cache/x.jsonl"]):
        lines(tmp_path / name, [{"text": str(at)}])
    (tmp_path / "README.md").write_text("# card")
    (tmp_path / "image.png").write_bytes(b"no")
    assert [row["text"] for row in values(tmp_path)] == ["1", "0", "2"]
    assert [row["text"] for row in values(tmp_path / "**" / "*.jsonl")] == ["1", "0", "2"]
    assert [row["text"] for row in values(tmp_path / "[ab]" / "?.jsonl")] == ["1", "0"]
    (tmp_path / "d.csv").write_text("text\nx\n")
    with pytest.raises(DataError, match=r"several kinds \(jsonl: 1\.jsonl and 2 more; csv: d\.csv\)"):
        open_source(SourceConfig(path=str(tmp_path)))


def test_a_row_that_cannot_be_read_says_where_and_why(tmp_path):
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
    assert "not UTF-8 (byte 11 of the line)" in found["8"].error
    assert "cannot be read as JSON" in found["9"].error


def test_a_broken_json_array_names_the_line(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('[\n {"text": "a"},\n "b",\n {"text": "\\ud800"},\n {"text" "c"}\n]')
    rows = open_source(SourceConfig(path=str(path))).rows()
    with pytest.raises(DataError, match=r"a\.json:5: not JSON \(Expecting ':' delimiter\)"):
        list(rows)
    path.write_text('[\n {"text": "a"},\n "b",\n {"text": "\\ud800"},\n {"text": "c"}\n]')
    assert [(row.where[-2:], row.error is None) for row in open_source(SourceConfig(path=str(path))).rows()] == [
        (":2", True),
        (":3", False),
        (":4", False),
        (":5", True),
    ]
    for more in ("[]", "x", " " * 70_000 + '{"text": "b"}'):
        path.write_text('[{"text": "a"}]\n' + more)
        with pytest.raises(DataError, match=r"a\.json:2: not JSON \(.* after the end"):
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


def test_a_json_array_larger_than_the_window_is_read_whole(tmp_path):
    rows = [{"text": "x" * (1 << at), "n": at} for at in range(19)] * 2
    (tmp_path / "a.json").write_text(json.dumps(rows))
    assert values(tmp_path / "a.json") == rows


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.one_of(st.just(""), st.just("   "), st.text(alphabet='ab"\\é\u2028 ', max_size=40)), min_size=1),
    st.integers(1, 60),
    st.booleans(),
    st.sampled_from(["\n", "\r\n"]),
)
def test_shards_of_any_size_give_the_lines_of_the_file(tmp_path, texts, shard_bytes, last_newline, newline):
    """Each line that is not blank comes once, in order, under its own number, wherever the file is cut."""
    body = newline.join(json.dumps({"text": text}, ensure_ascii=False) if text.strip(" ") else text for text in texts)
    path = tmp_path / "a.jsonl"
    path.write_bytes((body + newline * last_newline).encode())
    shards = list(line_shards(path, "a.jsonl", path.stat().st_size, shard_bytes, {}))
    assert [(row.where, row.value["text"]) for shard in shards for row in shard.rows()] == [
        (f"a.jsonl:{number}", text) for number, text in enumerate(texts, 1) if text.strip(" ")
    ]
    assert [shard.start for shard in shards[1:]] == [shard.end for shard in shards[:-1]]


def test_limit_counts_rows_across_files_and_reads_no_more(tmp_path):
    lines(tmp_path / "a.jsonl", CHATS[:2])
    (tmp_path / "b.jsonl").write_text("\n" + json.dumps(CHATS[2]) + "\n\n" + json.dumps(CHATS[3]) + "\nbroken")
    assert values(tmp_path, limit=4) == CHATS[:4]
    assert open_source(SourceConfig(path=str(tmp_path), limit=2)).size == (tmp_path / "a.jsonl").stat().st_size
    with gzip.open(tmp_path / "c.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in CHATS)
    assert [row.value for row in open_source(SourceConfig(path=str(tmp_path), limit=8)).rows()][5:] == CHATS[:3]
    (tmp_path / "t.txt").write_text("a\nb\nc\n")
    assert len(values(tmp_path / "t.txt", text_unit=TextUnit.line, limit=2)) == 2
    with pytest.raises(ConfigError, match="limit=0"):
        open_source(SourceConfig(path=str(tmp_path), limit=0))


def test_columns_are_renamed_before_the_format_is_detected(tmp_path):
    lines(tmp_path / "a.jsonl", [{"question": "q", "prompt": "old", "answer": "a"}])
    source = open_source(
        SourceConfig(path=str(tmp_path / "a.jsonl"), columns={"question": "prompt", "answer": "completion"})
    )
    assert next(source.rows()).value == {"prompt": "q", "completion": "a"}
    assert source.format() is RowFormat.prompt_completion
    typo = SourceConfig(
        path=str(tmp_path / "a.jsonl"), format=RowFormat.prompt_completion, columns={"qestion": "prompt"}
    )
    with pytest.raises(DataError, match=r"renames 'qestion'.*did you mean 'question'"):
        open_source(typo).format()


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
def test_formats_are_recognised(row, expected):
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
def test_rows_of_no_known_format_get_advice(row, advice):
    with pytest.raises(DataError) as caught:
        detect_format([row], "a.jsonl")
    message = str(caught.value)
    assert advice in message
    assert ", ".join(row) in message
    assert "prompt_completion: prompt, completion" in message


def test_a_path_that_is_not_there_is_said_to_be_missing_and_never_asked_of_the_hub(tmp_path, monkeypatch):
    lines(tmp_path / "data" / "train.jsonl", CHATS)
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


def test_a_hub_that_cannot_be_reached_is_one_error_within_seconds(monkeypatch):
    import datasets

    for offline in (True, False):  # without the flag there is no network here; nothing listens on this port
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", offline)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
        started = time.perf_counter()
        with pytest.raises(DataError, match=r"nobody/nothing-here.*hub cannot be reached.*hf download") as caught:
            open_source(SourceConfig(path="nobody/nothing-here"))
        assert time.perf_counter() - started < 8
        assert "HF_HUB_OFFLINE" in str(caught.value)
        assert datasets.config.HF_HUB_OFFLINE is offline


def test_without_a_network_the_cache_of_datasets_serves_the_revision_asked_for(tmp_path, monkeypatch):
    """The cache is laid out as datasets leaves it after a download."""
    import datasets

    made = datasets.load_dataset(
        "json", data_files=str(lines(tmp_path / "a.jsonl", CHATS)), cache_dir=str(tmp_path / "made"), split="train"
    )
    commit = "ab" * 20
    folder = tmp_path / "cache" / "nobody___thing" / "default" / "0.0.0" / commit
    shutil.copytree(Path(made.cache_files[0]["filename"]).parent, folder)
    (folder / "json-train.arrow").rename(folder / "thing-train.arrow")
    info = json.loads((folder / "dataset_info.json").read_text())
    info |= {"builder_name": "parquet", "dataset_name": "thing", "config_name": "default"}
    (folder / "dataset_info.json").write_text(json.dumps(info))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)

    def load(**config):
        return open_source(SourceConfig(path="nobody/thing", **config), tmp_path / "cache")

    for revision in (None, "main", commit):
        source = load(revision=revision, limit=3)
        assert [row.value for row in source.rows()] == CHATS[:3]
    assert next(source.rows()).where == "nobody/thing row 1"
    assert source.format() is RowFormat.messages
    for revision in ("cd" * 20, "v1"):
        with pytest.raises(DataError, match=f"HF_HUB_OFFLINE is set; .* revision {revision}"):
            load(revision=revision)
    with pytest.raises(DataError, match=r"Unknown split .*train"):
        load(split="test")
    with pytest.raises(DataError, match="config 'odd'"):
        load(subset="odd")


def test_a_saved_dict_of_splits_gives_the_split_asked_for(tmp_path):
    from datasets import Dataset, DatasetDict

    DatasetDict(train=Dataset.from_list(CHATS), test=Dataset.from_list(CHATS[:1])).save_to_disk(tmp_path / "saved")
    for split, count in (("train", len(CHATS)), ("test", 1)):
        assert len(list(open_source(SourceConfig(path=str(tmp_path / "saved"), split=split)).rows())) == count
    with pytest.raises(DataError, match=r"no split 'validation'\..*: test, train\."):
        open_source(SourceConfig(path=str(tmp_path / "saved"), split="validation"))


def test_a_saved_dataset_is_read_memory_mapped(tmp_path):
    from datasets import Dataset

    Dataset.from_list(CHATS).save_to_disk(tmp_path / "saved")
    source = open_source(SourceConfig(path=str(tmp_path / "saved"), limit=5))
    assert [row.value for row in source.rows()] == CHATS[:5]
    assert next(source.rows()).where.endswith("saved row 1")
    assert source.content_key() == open_source(SourceConfig(path=str(tmp_path / "saved"), limit=5)).content_key()


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


def test_builtin_data_and_its_names():
    with pytest.raises(DataError, match="builtin:nothing does not ship with fxtune"):
        open_source(SourceConfig(path="builtin:nothing"))


def test_weights_must_be_positive(tmp_path):
    for weight in (0.0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="weight"):
            open_source(SourceConfig(path=str(lines(tmp_path / "a.jsonl", CHATS)), weight=weight))


def test_the_content_key_follows_the_bytes_used_and_nothing_else(tmp_path, monkeypatch):
    path, copy = lines(tmp_path / "a.jsonl", CHATS), lines(tmp_path / "other" / "b.jsonl", CHATS)

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


def test_large_files_are_cut_into_shards_for_workers(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "SHARD_BYTES", 256)
    draw = random.Random(1)
    rows = [{"text": "w" * draw.randint(0, 90)} for _ in range(200)]
    source = open_source(SourceConfig(path=str(lines(tmp_path / "a.jsonl", rows))))
    shards = list(source.shards())
    assert len(shards) > 20
    assert all(isinstance(shard, LineShard) and shard.size < 500 for shard in shards)
    assert [row.value for shard in shards for row in shard.rows()] == rows
