"""JSON files: an array of objects, or an object with one such array among its values.

Values are decoded one by one from a window over the text, so one row is in memory at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from fxtune.data.formats.values import TOO_DEEP, RepeatedKeyError, is_too_deep, unique_keys
from fxtune.data.read.row import MAX_ROW_BYTES, Row, bad_row, checked_row, reading
from fxtune.errors import DataError


def json_rows(path: Path, name: str) -> Iterator[Row]:
    """Rows of a JSON file. Raises DataError with the line where the file is no JSON."""
    # surrogateescape: bytes that are not UTF-8 become lone surrogates, which `checked_row` reports.
    with reading(name), open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        scanner = _Scanner(file)
        try:
            start = scanner.peek()
            if start == "[":
                yield from _array_rows(scanner, name)
            elif start == "{":
                yield from _object_rows(scanner, name)
            else:
                raise DataError(
                    f"{name} begins with {start!r}. A .json file holds an array of rows; "
                    "for one row a line name it .jsonl."
                )
            scanner.require_end()
        except json.JSONDecodeError as problem:
            raise DataError(
                f"{name}:{scanner.line}: not JSON ({problem.msg}). The file cannot be read past it; "
                "only .jsonl, one row a line, can be read past a bad row."
            ) from problem


def _object_rows(scanner: _Scanner, name: str) -> Iterator[Row]:
    found: str | None = None
    scanner.take("{")
    while scanner.peek() != "}":
        key = scanner.value()
        scanner.take(":")
        if scanner.peek() == "[" and scanner.array_holds_objects():
            if found is not None:
                raise DataError(
                    f"{name} holds two lists of rows, {found!r} and {key!r}. Keep one of them in the file."
                )
            found = key
            yield from _array_rows(scanner, name)
        else:
            scanner.value()
        if scanner.peek() == ",":
            scanner.take(",")
    scanner.take("}")
    if found is None:
        raise DataError(
            f"{name} is an object without a list of rows in it. Make it an array of rows, or .jsonl with one row a "
            "line."
        )


def _array_rows(scanner: _Scanner, name: str) -> Iterator[Row]:
    scanner.take("[")
    while scanner.peek() != "]":
        where = f"{name}:{scanner.line}"
        value = scanner.value()
        text = scanner.text
        if is_too_deep(text, value):
            yield bad_row(where, TOO_DEEP, None)
        elif scanner.repeated:
            yield bad_row(where, scanner.repeated, text)
        else:
            yield checked_row(where, value, len(text), suspicious="\\u" in text or not text.isascii())
        if scanner.peek() != "]":
            scanner.take(",")
    scanner.take("]")


class _Scanner:
    """Reads the values of a JSON text in turn.

    `line`: of the next value; `text`: of the last one; `repeated`: why an object in the last one is ambiguous, or "".
    """

    def __init__(self, file: IO[str]) -> None:
        self.file, self.buffer, self.at, self.line, self.text, self.ended = file, "", 0, 1, "", False
        self.repeated = ""
        self.decoder = json.JSONDecoder(object_pairs_hook=self._object)

    def peek(self) -> str:
        """The next character that is not blank, without taking it."""
        while True:
            while self.at < len(self.buffer) and self.buffer[self.at] in " \t\r\n":
                self.line += self.buffer[self.at] == "\n"
                self.at += 1
            if self.at < len(self.buffer):
                return self.buffer[self.at]
            if not self.read_more():
                raise self.error("the file ends too early")

    def take(self, expected: str) -> None:
        if self.peek() != expected:
            raise self.error(f"expected {expected!r}, found {self.peek()!r}")
        self.at += 1

    def require_end(self) -> None:
        """Raise if anything follows."""
        while not self.buffer[self.at :].strip():
            if not self.read_more():
                return
        raise self.error(f"{self.peek()!r} after the end of the data")

    def array_holds_objects(self) -> bool:
        """Whether the first element of the array that comes next is an object."""
        while True:
            inside = self.buffer[self.at + 1 :].lstrip()
            if inside or not self.read_more():
                return inside.startswith("{")

    def value(self) -> Any:
        self.peek()
        while True:
            self.repeated = ""
            try:
                value, end = self.decoder.raw_decode(self.buffer, self.at)
            except json.JSONDecodeError as problem:
                # Near the window's end the value may go on beyond it.
                cut = problem.msg.startswith("Unterminated string") or problem.pos > len(self.buffer) - 16
                if cut and len(self.buffer) - self.at > 2 * MAX_ROW_BYTES:  # most often a quote that is never closed
                    raise self.error(
                        f"a value of more than {2 * MAX_ROW_BYTES >> 20} MiB, or without an end"
                    ) from None
                if not cut or not self.read_more():
                    raise
                continue
            except RecursionError as problem:
                raise self.error("nested too deeply") from problem
            if end == len(self.buffer) and self.read_more():  # 12 may be the beginning of 1234
                continue
            self.text = self.buffer[self.at : end]
            self.line += self.text.count("\n")
            self.at = end
            return value

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        # An exception would lose the end of the value, and with it all rows after this one.
        try:
            return unique_keys(pairs)
        except RepeatedKeyError as problem:
            self.repeated = str(problem)
            return dict(pairs)

    def read_more(self) -> bool:
        """Drop the text already decoded and read at least as much as is left. False at the file's end."""
        if not self.ended:
            left = self.buffer[self.at :]
            chunk = self.file.read(max(1 << 16, len(left)))
            self.ended = not chunk
            self.buffer, self.at = left + chunk, 0
        return not self.ended

    def error(self, message: str) -> json.JSONDecodeError:
        return json.JSONDecodeError(message, self.buffer, self.at)
