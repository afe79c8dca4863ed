"""One row of a source, the limits of rows, and functions that all readers share.

A row has a value, or the reason why it is a bad row. Its length is limited, because a tokenizer needs 300 bytes of
memory for each byte of text: 5 GB and 25 s for 16 MiB. Its depth is limited, because a value nested as deep as Python
allows cannot be written to the quarantine file. Readers skip a row that is too long and never hold it in memory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, Any, AnyStr

from fxtune.data.formats.registry import with_format_names
from fxtune.data.formats.values import RowError, type_name, unicode_fault
from fxtune.errors import ConfigError, DataError
from fxtune.plugins import ROW_FORMATS, Group

MAX_RAW_CHARACTERS = 100_000
"""Characters of a bad row that are kept for the quarantine file."""
MAX_ROW_BYTES = 16 << 20
"""A row with more bytes of text than this is a bad row."""
MAX_ROW_BYTES_WITH_IMAGES = 256 << 20
"""If rows may have images, a row with more bytes of text and images than this is a bad row."""

IMAGE_KEYS = {"image", "images", "image_url", "url", "path"}
"""Keys of rows and of parts of messages that name an image."""

_PLACE = re.compile(r"(.*)((?::| row )\d+)", re.DOTALL)  # `a.jsonl:17` or `a.parquet row 5`


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a source. Exactly one of `value` and `error` is set."""

    where: str
    """`file.jsonl:17` (line, counted from 1) or `file.parquet row 5` (counted from 1)."""
    value: dict[str, Any] | None
    error: str | None = None
    raw: Any = None
    """The part of a bad row that could be read."""
    size: int = 0
    """Approximate bytes of the row in its file."""


def file_and_place(where: str) -> tuple[str, str]:
    """Split Row.where into (file, place in the file). Without a place, returns ("", where)."""
    found = _PLACE.fullmatch(where)
    return (found[1], found[2]) if found else ("", where)


@dataclass(frozen=True)
class RowShard:
    """Rows that are pickled for a worker, because their source can only be read from front to back."""

    held: list[Row]
    size: int

    def rows(self) -> Iterator[Row]:
        return iter(self.held)


def row_shards(rows: Iterable[Row], shard_bytes: int, shard_rows: int = 1024) -> Iterator[RowShard]:
    """Collect rows, in order, into shards of at most `shard_rows` rows and about `shard_bytes` bytes."""
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


def checked_row(where: str, value: Any, size: int, suspicious: bool, keeps_images: bool = False) -> Row:
    """A row with `value`. It is a bad row if `value` is no object, is too long, or (checked only if `suspicious`) is
    not Unicode. With `keeps_images` the limit is MAX_ROW_BYTES_WITH_IMAGES."""
    if reason := length_fault(value, size, keeps_images):
        return bad_row(where, reason, None)
    if not isinstance(value, dict):
        return bad_row(where, f"the row is {type_name(value)}, not an object with named columns", value)
    text = json.dumps(value, ensure_ascii=False, default=type_name) if suspicious else ""  # images are bytes
    if reason := unicode_fault(text):
        return bad_row(where, reason, value)
    return Row(where, value, size=size)


def bad_row(where: str, error: str, raw: Any) -> Row:
    return Row(where, None, error, raw[:MAX_RAW_CHARACTERS] if isinstance(raw, str) else raw, size=1)


def longest_row(keeps_images: bool) -> int:
    """The number of bytes that a reader accepts in a row."""
    return MAX_ROW_BYTES_WITH_IMAGES if keeps_images else MAX_ROW_BYTES


def length_fault(value: Any, size: int, keeps_images: bool) -> str:
    """The reason why a row of `size` bytes is too long; empty if it is short enough."""
    if size <= MAX_ROW_BYTES:
        return ""
    if size > longest_row(keeps_images):
        return too_long(size, keeps_images)
    text = _text_bytes(value)
    if text <= MAX_ROW_BYTES:
        return ""
    return f"a row whose text alone has {text / 2**20:,.1f} MiB; the limit is {MAX_ROW_BYTES >> 20} MiB. Split it"


def _text_bytes(value: Any, key: str = "") -> int:
    """Approximate bytes of text in a row. Images do not count, whether they are bytes or `data:` URIs under
    IMAGE_KEYS."""
    if isinstance(value, str):
        return 0 if key in IMAGE_KEYS and value.startswith("data:") else len(value)
    if isinstance(value, Mapping):
        return sum(len(name) + _text_bytes(item, name) for name, item in value.items())
    return sum(_text_bytes(item, key) for item in value) if isinstance(value, (list, tuple)) else 0


def too_long(size: int, keeps_images: bool = False) -> str:
    found = f"a row of {size / 2**20:,.1f} MiB; the limit is {longest_row(keeps_images) >> 20} MiB"
    if keeps_images:
        return f"{found} with its images. Store them as files"
    return f"{found}. Split it into several rows"


@dataclass(frozen=True)
class Reading:
    """The changes that are made to the rows of a file. `columns`: {name in the data: new name}; an existing column of
    the new name is dropped. `plugin`: the row format of a plugin that converts the rows. If it is empty, rows in
    common shapes are converted for fxtune's formats (shapes.py). If it is None, rows are not converted."""

    columns: Mapping[str, str] = field(default_factory=dict)
    plugin: str | None = ""
    unused: tuple[str, ...] = ()
    keeps_images: bool = False

    def read(self, rows: Iterable[Row]) -> Iterator[Row]:
        convert = ROW_FORMATS[self.plugin] if self.plugin else None
        for row in rows:
            if row.value is None:
                yield row
                continue
            value = row.value
            for old in self.columns:
                value = lifted(value, old)
            if replaced := {new for old, new in self.columns.items() if old in value}:
                kept = {key: item for key, item in value.items() if key in self.columns or key not in replaced}
                value = {self.columns.get(key, key): item for key, item in kept.items()}
            try:
                found = convert(dict(value)) if convert else value
                if self.plugin == "":
                    found = with_format_names(value, self.unused, self.keeps_images)
            except (RowError, ConfigError) as reason:  # a plugin's error names the plugin's file and line
                yield bad_row(row.where, str(reason).rstrip("."), value)
                continue
            found = found.as_row() if isinstance(found, Group) else found
            yield checked_row(row.where, found, row.size, True) if convert else Row(row.where, found, size=row.size)


def lifted(row: dict[str, Any], name: str) -> dict[str, Any]:
    """Move a key of an object to a column: for `name` a.b, the key b of the object in column a becomes the column a.b.
    Returns `row` itself if there is no such key."""
    column, _, key = name.partition(".")
    inner = row.get(column)
    if name in row or not isinstance(inner, Mapping) or key not in inner:
        return row
    return {**row, column: {other: item for other, item in inner.items() if other != key}, name: inner[key]}


@contextmanager
def reading(name: str) -> Iterator[None]:
    """A context manager that turns an OSError into a DataError with the file's name."""
    try:
        yield
    except OSError as problem:
        raise DataError(
            f"{name} cannot be read: {problem.strerror or problem}. Does it still exist, and is it complete?"
        ) from problem


def bounded_lines(file: IO[AnyStr], newline: AnyStr, keeps_images: bool = False) -> Iterator[tuple[AnyStr, int]]:
    """Yield (line with its newline, its length). A line longer than longest_row() is cut to MAX_RAW_CHARACTERS."""
    limit = longest_row(keeps_images)
    while line := file.readline(limit + 1):
        length = len(line)
        if length > limit and not line.endswith(newline):
            line = line[:MAX_RAW_CHARACTERS]
            while rest := file.readline(1 << 20):
                length += len(rest)
                if rest.endswith(newline):
                    break
        yield line, length
