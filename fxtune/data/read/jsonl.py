"""JSONL files: one object per line. Files that are not compressed are cut into byte ranges for parallel workers."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fxtune.data.formats.values import NOT_UTF8, TOO_DEEP, RepeatedKeyError, is_too_deep, unique_keys
from fxtune.data.read.row import Reading, Row, bad_row, bounded_lines, checked_row, longest_row, reading, too_long
from fxtune.errors import DataError


@dataclass(frozen=True)
class LineShard:
    """The lines of a JSONL file from byte `start` up to byte `end`. Both are starts of lines, or the file's end."""

    path: str
    name: str
    start: int
    end: int
    first_line: int
    reading: Reading

    @property
    def size(self) -> int:
        return self.end - self.start

    def rows(self) -> Iterator[Row]:
        with reading(self.name), open(self.path, "rb") as file:
            file.seek(self.start)
            rows = _line_rows(file, self.name, self.first_line, self.size, self.reading.keeps_images)
            yield from self.reading.read(rows)


def line_shards(path: Path, name: str, end: int, shard_bytes: int, as_read: Reading) -> Iterator[LineShard]:
    """Cut the first `end` bytes of a file into shards: after the first newline in each block of `shard_bytes`. The
    same pass over the file counts the lines."""
    start, first_line, newlines, position = 0, 1, 0, 0
    with reading(name), open(path, "rb") as file:
        while position < end:
            block = file.read(min(shard_bytes, end - position))
            if not block:
                raise _shrunk(name)
            cut = block.find(b"\n") + 1 if position else 0
            if cut and position + cut < end:
                yield LineShard(str(path), name, start, position + cut, first_line, as_read)
                start, first_line = position + cut, newlines + 2
            newlines += block.count(b"\n")
            position += len(block)
    if start < end:
        yield LineShard(str(path), name, start, end, first_line, as_read)


def jsonl_rows(path: Path, name: str, keeps_images: bool = False) -> Iterator[Row]:
    """Yield all rows of a JSONL file, which may be compressed as .gz. `keeps_images`: see checked_row()."""
    is_gzip = path.suffix.lower() == ".gz"
    with reading(name), gzip.GzipFile(path) if is_gzip else open(path, "rb") as file:
        yield from _line_rows(file, name, keeps_images=keeps_images)


def _line_rows(
    file: Any, name: str, first_line: int = 1, size: int | None = None, keeps_images: bool = False
) -> Iterator[Row]:
    """Yield the rows in the next `size` bytes (None: all). Blank lines are no rows, but line numbers count them."""
    left, number = size if size is not None else float("inf"), first_line
    lines = bounded_lines(file, b"\n", keeps_images)
    while left > 0:
        try:
            line, length = next(lines, (b"", 0))
        except (OSError, EOFError, zlib.error) as problem:
            raise DataError(
                f"{name}:{number}: the file cannot be read past here ({problem}). Is it complete?"
            ) from problem
        if not length:
            if size is not None:
                raise _shrunk(name)
            return
        left -= length
        if number == 1:
            if line.startswith(b"\x1f\x8b"):
                raise DataError(f"{name} is compressed with gzip twice: unpack it once.")
            line = line.removeprefix(b"\xef\xbb\xbf")
        if length > longest_row(keeps_images):
            yield bad_row(f"{name}:{number}", too_long(length, keeps_images), line.decode(errors="backslashreplace"))
        elif line.strip():
            yield _parse(line, f"{name}:{number}", keeps_images)
        number += 1


def _parse(line: bytes, where: str, keeps_images: bool) -> Row:
    try:
        # The newline is removed. Otherwise an error at the line's end would be reported at column 1 of the next line.
        text = line.decode().rstrip("\r\n")
        value = json.loads(text, object_pairs_hook=unique_keys)
    except UnicodeDecodeError as problem:
        raw = line.decode(errors="backslashreplace")
        return bad_row(where, f"byte {problem.start + 1} of the line is {NOT_UTF8}", raw)
    except json.JSONDecodeError as problem:
        comma = "; a comma follows the row: remove it" * (text[problem.pos :].strip() == ",")
        return bad_row(where, f"not JSON ({problem.msg}, column {problem.colno}{comma})", text)
    except RepeatedKeyError as problem:
        return bad_row(where, str(problem), text)
    except (ValueError, RecursionError) as problem:  # a number with thousands of digits, or thousands of open brackets
        return bad_row(where, f"cannot be read as JSON ({problem})", text)
    if is_too_deep(text, value):
        return bad_row(where, TOO_DEEP, text)
    return checked_row(where, value, len(line), suspicious=b"\\u" in line, keeps_images=keeps_images)


def _shrunk(name: str) -> DataError:
    return DataError(f"{name} became shorter while it was read. Start again when nothing writes to it.")
