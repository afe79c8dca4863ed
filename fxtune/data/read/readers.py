"""Files that are read from front to back: JSON arrays, CSV, Parquet and text. JSONL, which can be cut, is in rows.py.

Each reader holds one row (or one small batch) at a time, whatever the size of the file.
"""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from fxtune.data.read.jsonl import NESTED, ROW_BYTES, Row, bad, checked, lines, reading, too_deep, too_long
from fxtune.errors import DataError


def json_rows(path: Path, name: str) -> Iterator[Row]:
    """Rows of a JSON file: an array of objects, or one object that holds such an array beside other values.

    Values are decoded one by one from a window over the text, so that a file of any size needs the memory of one row.
    """
    # surrogateescape: bytes that are not UTF-8 become half surrogates, which `checked` reports with their line.
    with reading(name), open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        scan = _Scanner(file)
        try:
            start = scan.peek()
            if start == "[":
                yield from _elements(scan, name)
            elif start == "{":
                yield from _object_with_list(scan, name)
            else:
                raise DataError(
                    f"{name} begins with {start!r}. A .json file holds an array of rows; "
                    "for one row a line name it .jsonl."
                )
            scan.require_end()
        except json.JSONDecodeError as problem:
            raise DataError(
                f"{name}:{scan.line}: not JSON ({problem.msg}). The file cannot be read past it; "
                "only .jsonl, one row a line, can be read around a bad row."
            ) from problem


def _object_with_list(scan: _Scanner, name: str) -> Iterator[Row]:
    found: str | None = None
    scan.take("{")
    while scan.peek() != "}":
        key = scan.value()
        scan.take(":")
        if scan.peek() == "[" and scan.opens_objects():
            if found is not None:
                raise DataError(
                    f"{name} holds two lists of rows, {found!r} and {key!r}. Keep one of them in the file."
                )
            found = key
            yield from _elements(scan, name)
        else:
            scan.value()
        if scan.peek() == ",":
            scan.take(",")
    scan.take("}")
    if found is None:
        raise DataError(
            f"{name} is an object without a list of rows in it. Make it an array of rows, "
            "or .jsonl with one row a line."
        )


def _elements(scan: _Scanner, name: str) -> Iterator[Row]:
    scan.take("[")
    while scan.peek() != "]":
        where = f"{name}:{scan.line}"
        value = scan.value()
        yield bad(where, NESTED, None) if scan.deep else checked(where, value, scan.used, suspicious=scan.suspicious)
        if scan.peek() != "]":
            scan.take(",")
    scan.take("]")


class _Scanner:
    """Values of a JSON text in turn. `line` is where the next one begins; `used`, the characters of the last one."""

    def __init__(self, file: IO[str]) -> None:
        self.file, self.buffer, self.at, self.line, self.used, self.ended = file, "", 0, 1, 0, False
        self.suspicious = self.deep = False
        self.decoder = json.JSONDecoder()

    def peek(self) -> str:
        """The next character that is not blank; it stays."""
        while True:
            while self.at < len(self.buffer) and self.buffer[self.at] in " \t\r\n":
                self.line += self.buffer[self.at] == "\n"
                self.at += 1
            if self.at < len(self.buffer):
                return self.buffer[self.at]
            if not self.more():
                raise json.JSONDecodeError("the file ends too early", self.buffer, self.at)

    def take(self, expected: str) -> None:
        if self.peek() != expected:
            raise json.JSONDecodeError(f"expected {expected!r}, found {self.peek()!r}", self.buffer, self.at)
        self.at += 1

    def require_end(self) -> None:
        """Nothing may follow: a second array behind the first would be rows that nobody sees."""
        while not self.buffer[self.at :].strip():
            if not self.more():
                return
        raise json.JSONDecodeError(f"{self.peek()!r} after the end of the data", self.buffer, self.at)

    def opens_objects(self) -> bool:
        """Whether the list that comes next begins with an object."""
        while True:
            inside = self.buffer[self.at + 1 :].lstrip()
            if inside or not self.more():
                return inside.startswith("{")

    def value(self) -> Any:
        self.peek()
        while True:
            try:
                value, end = self.decoder.raw_decode(self.buffer, self.at)
            except json.JSONDecodeError as problem:
                # Far from the window's end it is a mistake in the file; near it, the value may just go on outside.
                cut = problem.msg.startswith("Unterminated string") or problem.pos > len(self.buffer) - 16
                if not cut or self.too_long() or not self.more():
                    raise
                continue
            except RecursionError as problem:
                raise json.JSONDecodeError("nested too deeply", self.buffer, self.at) from problem
            if end == len(self.buffer) and self.more():  # 12 may be the beginning of 1234
                continue
            text = self.buffer[self.at : end]
            self.suspicious = "\\u" in text or not text.isascii()
            self.deep = too_deep(text, value)
            self.line += text.count("\n")
            self.used, self.at = end - self.at, end
            return value

    def too_long(self) -> bool:
        """Whether what the window holds has no end within twice a row's length: a quote that is never closed, most often."""
        if len(self.buffer) - self.at > 2 * ROW_BYTES:
            raise json.JSONDecodeError(
                f"a value of more than {2 * ROW_BYTES >> 20} MiB, or without an end", self.buffer, self.at
            )
        return False

    def more(self) -> bool:
        """Move the window on: what is decoded goes, at least as much as is left comes in."""
        if not self.ended:
            left = self.buffer[self.at :]
            chunk = self.file.read(max(1 << 16, len(left)))
            self.ended = not chunk
            self.buffer, self.at = left + chunk, 0
        return not self.ended


def csv_rows(path: Path, name: str) -> Iterator[Row]:
    """Rows of a CSV or TSV file with a header. All cells are strings: an answer "42" stays text.

    Quotes are taken strictly: one that is never closed would make the rest of the file a cell of its row.
    """
    csv.field_size_limit(ROW_BYTES)  # process-wide; the default of 128 KB is less than a long document
    with reading(name), open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        header = file.readline(ROW_BYTES)
        delimiter = "\t" if path.suffix == ".tsv" else max(",;\t", key=header.count)
        names = next(csv.reader([header], delimiter=delimiter), [])
        if twice := {column for column in names if names.count(column) > 1}:
            raise DataError(
                f"{name}:1: the header names a column twice: {', '.join(sorted(twice))}. Give each its own name."
            )
        reader = csv.reader(_bounded(file, name), delimiter=delimiter, strict=True)
        while True:
            where = f"{name}:{reader.line_num + 2}"
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as problem:
                if "limit" in str(problem):
                    raise DataError(
                        f"{where}: a cell of more than {ROW_BYTES >> 20} MiB. Is a quote closed there? The file "
                        "cannot be read past it."
                    ) from problem
                yield bad(where, f"not CSV ({problem})", None)
                continue
            if not cells:
                continue
            if len(cells) != len(names):
                yield bad(where, f"{len(cells)} cells under a header of {len(names)} columns", cells)
                continue
            size = sum(map(len, cells))
            yield checked(
                where, dict(zip(names, cells, strict=True)), size, suspicious=not all(map(str.isascii, cells))
            )


def _bounded(file: IO[str], name: str) -> Iterator[str]:
    for number, (line, length) in enumerate(lines(file, "\n"), 2):
        if length > ROW_BYTES:
            raise DataError(f"{name}:{number}: {too_long(length)}. The file cannot be read past it.")
        yield line


def parquet_rows(path: Path, name: str) -> Iterator[Row]:
    """Rows of a Parquet file, a few hundred at a time. Columns that `datasets` wrote in an encoding of its own are decoded."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        # Not through a memory map: a file that shrinks meanwhile would end the process (SIGBUS), not raise an error.
        with pq.ParquetFile(path, buffer_size=1 << 20) as file:
            decode, columns = _datasets_decoder(file.schema_arrow)
            for batch in file.iter_batches(batch_size=256, columns=columns):
                for row in arrow_rows(batch, name, number, decode):
                    number += 1
                    yield row
    except (pa.ArrowException, OSError, UnicodeDecodeError) as problem:
        after = f"after row {number}" if number else "as Parquet"
        raise DataError(
            f"{name} cannot be read {after}: {str(problem).splitlines()[0]}. Is the file whole?"
        ) from problem


def _datasets_decoder(schema: Any) -> tuple[Callable[[Any], Iterable[dict[str, Any]]], list[str] | None]:
    """What makes rows of a batch, and the columns that it wants (None: all): no images and sounds."""
    if b"huggingface" not in (schema.metadata or {}):
        return (lambda batch: batch.to_pylist()), None
    import pyarrow as pa
    from datasets import Dataset, DatasetInfo, Features

    features = Features(undecoded(Features.from_arrow_schema(schema)))
    left_out = media(features)
    kept = Features({name: feature for name, feature in features.items() if name not in left_out})
    info = DatasetInfo(features=kept)

    def decode(batch: Any) -> Iterator[dict[str, Any]]:
        return iter(Dataset(pa.Table.from_batches([batch.replace_schema_metadata(schema.metadata)]), info=info))

    return decode, list(kept) if left_out else None


def media(features: Any) -> list[str]:
    """The columns that hold an image, a sound or the like."""
    return [name for name, feature in features.items() if hasattr(feature, "decode")]


def undecoded(feature: Any) -> Any:
    """A feature of `datasets`, or a dict of them, in which no image or sound is decoded, however deep it stands.

    To decode one, `datasets` opens whatever file or URL the row names: a dataset could have any of ours read.
    """
    if isinstance(feature, dict):
        return {name: undecoded(inner) for name, inner in feature.items()}
    if isinstance(feature, (list, tuple)):
        return [undecoded(inner) for inner in feature]
    if hasattr(feature, "decode"):
        return dataclasses.replace(feature, decode=False)
    if hasattr(feature, "feature"):
        return dataclasses.replace(feature, feature=undecoded(feature.feature))
    return feature


def arrow_rows(table: Any, name: str, done: int, decode: Callable[[Any], Iterable[dict[str, Any]]]) -> Iterator[Row]:
    """Some hundred rows of Arrow, which come after `done` others. One that is too long is left as it is in Arrow's memory.

    Arrow gives every struct all keys, null where a row had none: those are dropped again (`content` stays: chat templates look
    at it, and a turn that only calls tools has it null).
    """
    sizes = [table.slice(at, 1).nbytes for at in range(len(table))] if table.nbytes > ROW_BYTES else []
    size, begin = max(1, table.nbytes // max(1, len(table))), 0
    for end in [*(at for at, each in enumerate(sizes) if each > ROW_BYTES), len(table)]:
        for at, value in enumerate(decode(table.slice(begin, end - begin)) if end > begin else (), done + begin + 1):
            kept = {key: _without_nulls(item) for key, item in value.items() if item is not None}
            yield Row(f"{name} row {at}", kept, size=size)
        if end < len(table):
            yield bad(f"{name} row {done + end + 1}", too_long(sizes[end]), None)
        begin = end + 1


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None or key == "content"}
    if isinstance(value, list) and value and not isinstance(value[0], (int, str)):
        return [_without_nulls(item) for item in value]
    return value


def text_rows(path: Path, name: str, unit: str) -> Iterator[Row]:
    """Rows of a text file: the whole of it (`document`), what stands between blank lines (`paragraph`), or each `line`."""
    with reading(name), open(path, encoding="utf-8-sig", errors="surrogateescape") as file:
        if unit == "document":
            size = path.stat().st_size
            yield _too_long_text(name, size, "") if size > ROW_BYTES else _text_row(name, file.read())
            return
        held: list[str] = []
        first = total = 1
        for number, (line, length) in enumerate(lines(file, "\n"), 1):
            if length > ROW_BYTES:
                yield _too_long_text(f"{name}:{number}", length, line)
            elif line.strip() and unit == "paragraph":
                first, total = (first, total + length) if held else (number, length)
                held += [line] if total <= 2 * ROW_BYTES else []  # a row that is too long already need not be whole
            elif line.strip():
                yield _text_row(f"{name}:{number}", line.rstrip("\n"))
            elif held:
                yield _text_row(f"{name}:{first}", "".join(held).rstrip("\n"))
                held = []
        if held:
            yield _text_row(f"{name}:{first}", "".join(held).rstrip("\n"))


def _text_row(where: str, text: str) -> Row:
    try:
        size = len(text.encode())
    except UnicodeEncodeError as problem:
        return bad(where, f"not UTF-8 (character {problem.start + 1})", text)
    if size > ROW_BYTES:
        return _too_long_text(where, size, text)
    return Row(where, {"text": text}, size=size)


def _too_long_text(where: str, size: int, text: str) -> Row:
    return bad(where, f"{too_long(size)}: set the source's text_unit to paragraph or line", text)
