"""JSON files: an array of objects, or an object with one such array among its values.

Values are decoded one by one from a window over the text, so one row is in memory at a time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from fxtune.data.formats.values import TOO_DEEP, RepeatedKeyError, is_too_deep, unique_keys
from fxtune.data.read.row import MAX_ROW_BYTES, Row, bad_row, checked_row, reading
from fxtune.errors import DataError

_BLANKS = re.compile(r"[ \t\r\n]*")


def json_rows(path: Path, name: str) -> Iterator[Row]:
    """Yield the rows of a JSON file. Raises DataError when it reaches text that is not JSON."""
    count = 0
    # With surrogateescape, bytes that are not UTF-8 become lone surrogates. checked_row() reports them.
    with reading(name), open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        text = _Text(file)
        try:
            for value, written in _values(text, name):
                count += 1
                where = f"{name} row {count}"
                if is_too_deep(written, value):
                    yield bad_row(where, TOO_DEEP, None)
                elif text.repeated:
                    yield bad_row(where, text.repeated, written)
                else:
                    suspicious = "\\u" in written or not written.isascii()
                    yield checked_row(where, value, len(written), suspicious)
        except json.JSONDecodeError as problem:
            raise DataError(
                f"{name}: not JSON after row {count} ({problem.msg}). The file cannot be read past it; "
                "only .jsonl, one row a line, can be read past a bad row."
            ) from problem


def _values(text: _Text, name: str) -> Iterator[tuple[Any, str]]:
    """Yield (value, its JSON text) for each row in the file's array. Raises DataError unless there is one array."""
    start = text.peek()
    if start == "[":
        yield from (text.value() for _ in text.items("[", "]"))
    elif start == "{":
        found: list[str] = []
        for _ in text.items("{", "}"):
            key, _ = text.value()
            text.take(":")
            if text.peek() == "[" and text.array_holds_objects():
                found.append(key)
                if found[1:]:
                    raise DataError(
                        f"{name} holds two lists of rows, {found[0]!r} and {key!r}. Keep one of them in the file."
                    )
                yield from (text.value() for _ in text.items("[", "]"))
            else:
                text.value()
        if not found:
            raise DataError(
                f"{name} is an object without a list of rows in it. Make it an array of rows, or .jsonl with one row "
                "a line."
            )
    else:
        raise DataError(
            f"{name} begins with {start!r}. A .json file holds an array of rows; for one row a line name it .jsonl."
        )
    if more := text.peek():
        raise text.error(f"{more!r} after the end of the data")


class _Text:
    """A JSON text that is read from front to back. `repeated`: the fault if the last value has a key twice, or ""."""

    def __init__(self, file: IO[str]) -> None:
        self.file, self.window, self.at, self.repeated = file, "", 0, ""
        self.decoder = json.JSONDecoder(object_pairs_hook=self._object)

    def peek(self) -> str:
        """Return the next character that is not blank, and do not consume it. Empty at the end of the file."""
        while True:
            blanks = _BLANKS.match(self.window, self.at)
            self.at = blanks.end() if blanks else self.at
            if self.at < len(self.window):
                return self.window[self.at]
            if not self._read_more():
                return ""

    def take(self, expected: str) -> None:
        if (found := self.peek()) != expected:
            raise self.error(f"expected {expected!r}, found {found!r}" if found else "the file ends too early")
        self.at += 1

    def items(self, opening: str, closing: str) -> Iterator[None]:
        """Yield before each item of an array or an object. The caller reads the item."""
        self.take(opening)
        while self.peek() != closing:
            yield
            if self.peek() != closing:
                self.take(",")
        self.take(closing)

    def array_holds_objects(self) -> bool:
        """Whether the array that begins here has an object as its first element."""
        while True:
            inside = self.window[self.at + 1 :].lstrip()
            if inside or not self._read_more():
                return inside.startswith("{")

    def value(self) -> tuple[Any, str]:
        """Read the next value. Returns (value, its JSON text)."""
        self.peek()
        while True:
            self.repeated = ""
            try:
                value, end = self.decoder.raw_decode(self.window, self.at)
            except json.JSONDecodeError as problem:
                # If the error is near the end of the window, the rest of the value may not have been read yet.
                cut = problem.msg.startswith("Unterminated string") or problem.pos > len(self.window) - 16
                if cut and len(self.window) - self.at > 2 * MAX_ROW_BYTES:  # usually a quote that is not closed
                    raise self.error(
                        f"a value of more than {2 * MAX_ROW_BYTES >> 20} MiB, or without an end"
                    ) from None
                if not cut or not self._read_more():
                    raise
                continue
            except RecursionError as problem:
                raise self.error("nested too deeply") from problem
            if end == len(self.window) and self._read_more():  # 12 may be the beginning of 1234
                continue
            written, self.at = self.window[self.at : end], end
            return value, written

    def error(self, message: str) -> json.JSONDecodeError:
        return json.JSONDecodeError(message, self.window, self.at)

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        # After an exception the parser would not know where the value ends, and later rows could not be read.
        try:
            return unique_keys(pairs)
        except RepeatedKeyError as problem:
            self.repeated = str(problem)
            return dict(pairs)

    def _read_more(self) -> bool:
        """Drop the decoded text from the window and read more of the file. False at the end of the file."""
        left = self.window[self.at :]
        chunk = self.file.read(max(1 << 16, len(left)))
        if chunk:
            self.window, self.at = left + chunk, 0
        return bool(chunk)
