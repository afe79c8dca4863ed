"""From a file to its rows: what can be read is a `Row` with a value, what cannot is a `Row` with the reason.

Nothing here knows what a row means (formats.py) or where files come from (sources.py). Every reader holds one row at a time
and knows the line it stands on, because "line 81723 is not JSON" is mended in a minute and "cannot read the dataset" is not.

A row has bounds, because a tokenizer needs 300 bytes for each byte of a text (16 MiB: 5 GB and 25 s), and because what is
nested as deep as Python goes cannot be written into a quarantine. What is longer is never held: it is skipped as it is read.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from fxtune.errors import DataError

_Text = TypeVar("_Text", str, bytes, covariant=True)

RAW_CHARACTERS = 100_000
"""A bad row is kept for the quarantine up to this length."""
ROW_BYTES = 16 << 20
"""A longer row is a bad row."""
DEPTH = 100
"""So is one in which lists and objects are nested deeper."""


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
        with reading(self.name), open(self.path, "rb") as file:
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
    with reading(name), open(path, "rb") as file:
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


@contextmanager
def reading(name: str) -> Iterator[None]:
    """A file that cannot be opened or read on is the data's fault, not the cache's."""
    try:
        yield
    except OSError as problem:
        raise DataError(
            f"{name} cannot be read: {problem.strerror or problem}. Is it still there, and whole?"
        ) from problem


class _Lines(Protocol[_Text]):
    def readline(self, size: int, /) -> _Text: ...


def lines(file: _Lines[_Text], newline: _Text) -> Iterator[tuple[_Text, int]]:
    """(line with its end, its length). Of one that is longer than ROW_BYTES only as much as a quarantine keeps."""
    while line := file.readline(ROW_BYTES + 1):
        length = len(line)
        if length > ROW_BYTES and not line.endswith(newline):
            line = line[:RAW_CHARACTERS]
            while rest := file.readline(1 << 20):
                length += len(rest)
                if rest.endswith(newline):
                    break
        yield line, length


def line_rows(file: _Lines[bytes], name: str, first_line: int = 1, size: int | None = None) -> Iterator[Row]:
    """Rows of the next `size` bytes (None: all) of a JSONL file. Blank lines are no rows, but they count as lines."""
    left, number = size if size is not None else float("inf"), first_line
    several = lines(file, b"\n")
    while left > 0:
        try:
            line, length = next(several, (b"", 0))
        except (OSError, EOFError, zlib.error) as problem:
            raise DataError(
                f"{name}:{number}: the file cannot be read past here ({problem}). Is it whole?"
            ) from problem
        if not length:
            if size is not None:
                raise DataError(f"{name} became shorter while it was read. Start again once nothing writes to it.")
            return
        left -= length
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if length > ROW_BYTES:
            yield bad(f"{name}:{number}", too_long(length), line.decode(errors="backslashreplace"))
        elif line.strip():
            yield _line(line, f"{name}:{number}")
        number += 1


def line_file_rows(path: Path, name: str) -> Iterator[Row]:
    """All rows of a JSONL file, from front to back; .gz is unpacked on the way."""
    with reading(name), (gzip.open if path.suffix.lower() == ".gz" else open)(path, "rb") as file:
        yield from line_rows(file, name)


def _line(line: bytes, where: str) -> Row:
    try:
        text = line.decode().rstrip(
            "\r\n"
        )  # with its end, what is missing there would be missing in column 1 of a next line
    except UnicodeDecodeError as problem:
        return bad(where, f"not UTF-8 (byte {problem.start + 1} of the line)", line.decode(errors="backslashreplace"))
    try:
        value = json.loads(text)
    except json.JSONDecodeError as problem:
        return bad(where, f"not JSON ({problem.msg}, column {problem.colno})", text)
    except (ValueError, RecursionError) as problem:  # a number of thousands of digits, or brackets nested as deep
        return bad(where, f"cannot be read as JSON ({problem})", text)
    if too_deep(text, value):
        return bad(where, NESTED, text)
    return checked(where, value, len(line), suspicious=b"\\u" in line)


def too_long(size: int) -> str:
    return f"a row of {size / 2**20:,.1f} MiB; one may have {ROW_BYTES >> 20} MiB. Make several rows of it"


NESTED = f"lists and objects are nested more than {DEPTH} deep"


def too_deep(text: str, value: Any) -> bool:
    """Whether a value that was read from `text` is nested deeper than DEPTH."""
    if text.count("[") + text.count("{") <= DEPTH:
        return False
    level = [value]
    for _ in range(DEPTH):
        level = [
            item
            for outer in level
            if isinstance(outer, (list, dict))
            for item in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return False
    return any(isinstance(item, (list, dict)) for item in level)


def checked(where: str, value: Any, size: int, suspicious: bool) -> Row:
    """A row of `value`, unless that is no object, too long, or holds text that is no Unicode. `suspicious`: whether it can."""
    if size > ROW_BYTES:
        return bad(where, too_long(size), None)
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
    return {list: "a list", str: "a string", int: "a number", float: "a number", bool: "a truth value"}.get(
        type(value), "null"
    )
