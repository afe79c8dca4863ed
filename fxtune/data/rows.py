"""From a file to its rows: what can be read is a `Row` with a value, what cannot is a `Row` with the reason.

Nothing here knows what a row means (formats.py) or where files come from (sources.py). Every reader holds one row at a time
and knows the line it stands on, because "line 81723 is not JSON" is mended in a minute and "cannot read the dataset" is not.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from io import BufferedIOBase
from pathlib import Path
from typing import Any

from fxtune.errors import DataError

RAW_CHARACTERS = 100_000
"""A bad row is kept for the quarantine up to this length."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a source. Exactly one of `value` and `error` is set."""

    where: str
    """`file.jsonl:17` (the line, from 1 on) or `file.parquet row 5` (from 1 on)."""
    value: dict[str, Any] | None
    error: str | None = None
    raw: Any = None
    """What could be read of a bad row."""
    size: int = 0
    """About how many bytes the row has in its file."""


@dataclass(frozen=True)
class LineShard:
    """The lines of a JSONL file whose first byte is in [start, end). Both are the beginnings of lines."""

    path: str
    name: str
    start: int
    end: int
    first_line: int
    columns: dict[str, str] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return self.end - self.start

    def rows(self) -> Iterator[Row]:
        with open(self.path, "rb") as file:
            file.seek(self.start)
            yield from renamed(line_rows(file, self.name, self.first_line, self.size), self.columns)


@dataclass(frozen=True)
class RowShard:
    """Rows already read, for sources that can only be read from front to back. Small: they travel to a worker."""

    held: list[Row]
    size: int

    def rows(self) -> Iterator[Row]:
        return iter(self.held)


Shard = LineShard | RowShard


def line_shards(path: Path, name: str, end: int, shard_bytes: int, columns: dict[str, str]) -> Iterator[LineShard]:
    """Cut the first `end` bytes of a file at the first end of a line in each `shard_bytes`. The parts know their first line's
    number, which costs one fast pass over the file (newlines are counted, nothing is parsed)."""
    start, first_line, newlines, position = 0, 1, 0, 0
    with open(path, "rb") as file:
        while position < end:
            block = file.read(min(shard_bytes, end - position))
            if not block:
                raise DataError(f"{name} became shorter while it was read. Start again once nothing writes to it.")
            cut = block.find(b"\n") + 1 if position else 0
            if cut and position + cut < end:
                yield LineShard(str(path), name, start, position + cut, first_line, columns)
                start, first_line = position + cut, newlines + 2
            newlines += block.count(b"\n")
            position += len(block)
    if start < end:
        yield LineShard(str(path), name, start, end, first_line, columns)


def row_shards(rows: Iterable[Row], shard_bytes: int, shard_rows: int = 1024) -> Iterator[RowShard]:
    """Gather rows, in order, into shards of at most `shard_rows` and about `shard_bytes`."""
    held: list[Row] = []
    size = 0
    for row in rows:
        held.append(row)
        size += row.size
        if size >= shard_bytes or len(held) >= shard_rows:
            yield RowShard(held, size)
            held, size = [], 0
    if held:
        yield RowShard(held, size)


def renamed(rows: Iterable[Row], columns: dict[str, str]) -> Iterator[Row]:
    """Rename the rows' columns, {their name: ours}. A column that already has our name gives way."""
    if not columns:
        yield from rows
        return
    for row in rows:
        if row.value is None:
            yield row
            continue
        given = {ours for theirs, ours in columns.items() if theirs in row.value}
        value = {columns.get(key, key): item for key, item in row.value.items() if key in columns or key not in given}
        yield Row(row.where, value, size=row.size)


def line_rows(file: BufferedIOBase, name: str, first_line: int = 1, size: int | None = None) -> Iterator[Row]:
    """Rows of the next `size` bytes (None: all) of a JSONL file. Blank lines are no rows, but they count as lines."""
    left, number = size if size is not None else float("inf"), first_line
    while left > 0:
        try:
            line = file.readline()
        except (OSError, EOFError, zlib.error) as problem:
            raise DataError(f"{name}:{number}: the file cannot be read past here ({problem}). Is it whole?") from problem
        if not line:
            if size is not None:
                raise DataError(f"{name} became shorter while it was read. Start again once nothing writes to it.")
            return
        left -= len(line)
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if line.strip():
            yield _line(line, f"{name}:{number}")
        number += 1


def line_file_rows(path: Path, name: str) -> Iterator[Row]:
    """All rows of a JSONL file, from front to back; .gz is unpacked on the way."""
    with (gzip.open if path.suffix.lower() == ".gz" else open)(path, "rb") as file:
        yield from line_rows(file, name)


def _line(line: bytes, where: str) -> Row:
    try:
        text = line.decode().rstrip("\r\n")  # with its end, what is missing there would be missing in column 1 of a next line
    except UnicodeDecodeError as problem:
        return bad(where, f"not UTF-8 (byte {problem.start + 1} of the line)", line.decode(errors="backslashreplace"))
    try:
        value = json.loads(text)
    except json.JSONDecodeError as problem:
        return bad(where, f"not JSON ({problem.msg}, column {problem.colno})", text)
    except (ValueError, RecursionError) as problem:  # a number of thousands of digits, or brackets nested as deep
        return bad(where, f"cannot be read as JSON ({problem})", text)
    return checked(where, value, len(line), suspicious=b"\\u" in line)


def checked(where: str, value: Any, size: int, suspicious: bool) -> Row:
    """A row of `value`, unless that is no object or holds text that is no Unicode. `suspicious`: whether the latter can be."""
    if not isinstance(value, dict):
        return bad(where, f"the row is {_kind(value)}, not an object with named columns", value)
    if suspicious:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return bad(where, "holds half a surrogate pair (a broken emoji, or bytes that are not UTF-8)", value)
    return Row(where, value, size=size)


def bad(where: str, error: str, raw: Any) -> Row:
    if isinstance(raw, str) and len(raw) > RAW_CHARACTERS:
        raw = raw[:RAW_CHARACTERS]
    return Row(where, None, error, raw, size=1)


def _kind(value: Any) -> str:
    return {list: "a list", str: "a string", int: "a number", float: "a number", bool: "a truth value"}.get(type(value), "null")
