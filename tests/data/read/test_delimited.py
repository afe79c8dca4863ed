"""CSV files: cells stay text, and each row knows its line."""

import csv

import pytest
from support.rows import places, values

from fxtune.data.config import SourceConfig
from fxtune.data.formats.registry import FORMATS
from fxtune.data.read.sources import open_source
from fxtune.errors import DataError


def test_csv_cells_stay_text_and_rows_know_their_line(tmp_path):
    with open(tmp_path / "a.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([["instruction", "output"], ["add 1,\nthen 2", "003"], ["x", ""], ["NA", "null"]])
    assert values(tmp_path / "a.csv") == [
        {"instruction": "add 1,\nthen 2", "output": "003"},
        {"instruction": "x", "output": ""},
        {"instruction": "NA", "output": "null"},
    ]
    assert places(tmp_path / "a.csv") == [":2", ":4", ":5"]
    assert open_source(SourceConfig(path=str(tmp_path / "a.csv"))).format() is FORMATS["alpaca"]
    (tmp_path / "b.csv").write_text("prompt;completion\na,b;c\nonly one\n")
    good, short = open_source(SourceConfig(path=str(tmp_path / "b.csv"))).rows()
    assert good.value == {"prompt": "a,b", "completion": "c"}
    assert short.value is None
    assert short.where.endswith("b.csv:3")
    assert "1 cells under a header of 2 columns" in short.error
    assert short.raw == ["only one"]


@pytest.mark.parametrize(
    ("text", "kind"), [('{"text": "a, b"}\n{"text": "c"}\n', ".jsonl"), ('[{"text": "a"}]\n', ".json")]
)
def test_json_under_the_name_of_csv_is_named(tmp_path, text, kind):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(DataError, match=rf"a\.csv .*{kind}\.$"):
        values(tmp_path / "a.csv")
