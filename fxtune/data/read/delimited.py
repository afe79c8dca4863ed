"""CSV and TSV files with a header line."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from fxtune.data.formats.values import unicode_fault
from fxtune.data.read.row import MAX_ROW_BYTES, Row, bad_row, bounded_lines, checked_row, reading, too_long
from fxtune.errors import DataError


def csv_rows(path: Path, name: str) -> Iterator[Row]:
    """Yield the rows of a CSV or TSV file. All cells are strings. Quotes are parsed strictly: otherwise a quote that
    is not closed would turn the rest of the file into one cell."""
    csv.field_size_limit(MAX_ROW_BYTES)  # for the whole process; a long document has more than the default of 128 KB
    with reading(name), open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        header = file.readline(MAX_ROW_BYTES)
        if header.startswith(("{", "[")):
            ending = ".jsonl" if header.startswith("{") else ".json"
            raise DataError(
                f"{name} begins with {header[0]} and holds JSON, not cells under a header: name it {ending}."
            )
        if reason := unicode_fault(header):
            raise DataError(f"{name}:1: {reason}.")
        delimiter = "\t" if path.suffix == ".tsv" else max(",;\t", key=header.count)
        columns = next(csv.reader([header], delimiter=delimiter), [])
        if repeated := {column for column in columns if columns.count(column) > 1}:
            raise DataError(
                f"{name}:1: the header names a column twice: {', '.join(sorted(repeated))}. Give each its own name."
            )
        reader = csv.reader(_lines(file, name), delimiter=delimiter, strict=True)
        while True:
            where = f"{name}:{reader.line_num + 2}"
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as problem:
                if "limit" in str(problem):
                    raise DataError(
                        f"{where}: a cell of more than {MAX_ROW_BYTES >> 20} MiB. Is a quote not closed there? The "
                        "file cannot be read past it."
                    ) from problem
                yield bad_row(where, f"not CSV ({problem})", None)
                continue
            if cells and len(cells) != len(columns):
                yield bad_row(where, f"{len(cells)} cells under a header of {len(columns)} columns", cells)
            elif cells:
                suspicious = not all(map(str.isascii, cells))
                yield checked_row(where, dict(zip(columns, cells, strict=True)), sum(map(len, cells)), suspicious)


def _lines(file: IO[str], name: str) -> Iterator[str]:
    for number, (line, length) in enumerate(bounded_lines(file, "\n"), 2):
        if length > MAX_ROW_BYTES:
            raise DataError(f"{name}:{number}: {too_long(length)}. The file cannot be read past it.")
        yield line
