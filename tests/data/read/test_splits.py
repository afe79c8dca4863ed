"""`split` and `revision` of data on this disk: the rows that they name, or one error."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.rows import CHATS, values, write_jsonl

from fxtune.data.config import SourceConfig, TextUnit
from fxtune.data.read.sources import open_source
from fxtune.errors import DataError

ROWS = [{"text": f"row {number}"} for number in range(20)]


@pytest.fixture
def folder(tmp_path):
    """A folder whose files are named by splits, with a card that is no data."""
    write_jsonl(tmp_path / "chats" / "train.jsonl", ROWS[:15])
    write_jsonl(tmp_path / "chats" / "test.jsonl", ROWS[15:18])
    write_jsonl(tmp_path / "chats" / "validation-00000-of-00001.jsonl", ROWS[18:])
    (tmp_path / "chats" / "README.md").write_text("a card")
    return tmp_path / "chats"


@pytest.mark.parametrize(
    ("split", "rows"),
    [
        ("train", ROWS[:15]),
        ("test", ROWS[15:18]),
        ("validation", ROWS[18:]),
        ("train[:20%]", ROWS[:3]),
        ("train[2:5]", ROWS[2:5]),
        ("train[-20%:]", ROWS[12:15]),
        ("train[14:]+test", ROWS[14:18]),
    ],
)
def test_a_folder_has_the_splits_that_its_files_name(split, rows, folder):
    assert values(folder, split=split) == rows
    assert values(folder, split=split, limit=2) == rows[:2]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "txt"])
def test_rows_of_a_file_are_those_of_the_datasets_library(kind, tmp_path):
    from datasets import ReadInstruction

    path = tmp_path / f"a.{kind}"
    if kind == "jsonl":
        path.write_text("\n" + "\n\n".join(f'{{"text": "row {number}"}}' for number in range(20)) + "\n")
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), path)
    else:
        path.write_text("".join(row["text"] + "\n" for row in ROWS))
    for split in (
        "train",
        "train[:10%]",
        "train[15%:]",
        "train[5:7]",
        "train[-5%:]",
    ):
        ranges = ReadInstruction.from_spec(split).to_absolute({"train": 20})
        expected = [row for one in ranges for row in ROWS[one.from_ : one.to]]
        assert values(path, split=split, text_unit=TextUnit.line) == expected, split


@given(begin=st.integers(-20, 20), end=st.integers(-20, 20))
def test_two_slices_that_meet_hold_each_row_once(begin, end, tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "a.jsonl"
    write_jsonl(path, ROWS)
    for cut in (begin, end):
        if cut % 20 > 0:
            assert values(path, split=f"train[:{cut}]") + values(path, split=f"train[{cut}:]") == ROWS


def test_slices_have_tables_of_their_own(folder):
    keys = {open_source(SourceConfig(str(folder), split=s)).content_key() for s in ("train", "train[:3]", "train[3:]")}
    assert len(keys) == 3


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ({"split": "test"}, r"a\.jsonl is one file, and split='test' would be ignored\. .*train\[:10%\]"),
        ({"split": "train[90:]"}, r"split='train\[90:\]' names no row \(train has 7 rows\)"),
        ({"split": "train[:a]"}, r"is no split .*\. Write one as in train, train\[:10%\]"),
        ({"split": "train["}, "is no split"),
        ({"split": ""}, "is no split"),
        ({"subset": "default"}, "is on this disk and has no subset: subset='default' would be ignored"),
        ({"revision": "main"}, "is on this disk and has no revision"),
    ],
)
def test_what_a_file_cannot_have_is_refused(key, message, tmp_path):
    write_jsonl(tmp_path / "a.jsonl", CHATS)
    with pytest.raises(DataError, match=message):
        open_source(SourceConfig(path=str(tmp_path / "a.jsonl"), **key))


def test_a_split_that_a_folder_lacks_is_refused_with_those_that_it_has(folder, tmp_path):
    (folder / "test.jsonl").unlink()
    with pytest.raises(DataError, match=r"has no split 'test'\. .*\(train, validation\)"):
        open_source(SourceConfig(str(folder), split="test"))
    write_jsonl(tmp_path / "plain" / "a.jsonl", ROWS)
    write_jsonl(tmp_path / "plain" / "b.jsonl", ROWS)
    with pytest.raises(DataError, match=r"Its files: a\.jsonl, b\.jsonl"):
        open_source(SourceConfig(str(tmp_path / "plain" / "*.jsonl"), split="held_out"))


def test_saved_datasets_take_slices(tmp_path):
    from datasets import Dataset, DatasetDict

    both = DatasetDict(train=Dataset.from_list(ROWS[:15]), test=Dataset.from_list(ROWS[15:]))
    both.save_to_disk(tmp_path / "both")
    both["test"].save_to_disk(tmp_path / "one")
    assert values(tmp_path / "both", split="train[:20%]+test[:1]") == [*ROWS[:3], ROWS[15]]
    assert values(tmp_path / "one", split="train[:2]") == ROWS[15:17]
    with pytest.raises(DataError, match=r"is one split \(train\), and not 'test'"):
        open_source(SourceConfig(str(tmp_path / "one"), split="test"))
    with pytest.raises(DataError, match="has no subset"):
        open_source(SourceConfig(str(tmp_path / "both"), subset="x"))
