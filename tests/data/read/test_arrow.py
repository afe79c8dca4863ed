"""Parquet files, and datasets saved to disk."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.rows import places, values

from fxtune.errors import DataError


def test_parquet_rows_have_no_nulls_that_arrow_added(tmp_path):
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


@pytest.mark.parametrize(
    "entry",
    [
        b"{no json",
        b"\xff",
        b"7",
        b'{"info": {"features": [1]}}',
        b'{"info": {"features": {"text": {"_type": "Unknown"}}}}',
        b'{"info": {"features": {"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}}}",
    ],
    ids=["no json", "no text", "number", "list", "unknown", "deep"],
)
def test_a_description_of_columns_that_cannot_be_read_names_the_file(tmp_path, entry):
    table = pa.table({"text": ["a"]}).replace_schema_metadata({b"huggingface": entry})
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet.*`huggingface`"):
        values(tmp_path / "a.parquet")
    pq.write_table(table.replace_schema_metadata(None), tmp_path / "a.parquet")  # as the message says
    assert values(tmp_path / "a.parquet") == [{"text": "a"}]
