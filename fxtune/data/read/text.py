"""Text files. A row is a whole file, a paragraph or a line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fxtune.data.formats.values import unicode_fault
from fxtune.data.read.row import MAX_ROW_BYTES, Row, bad_row, bounded_lines, reading, too_long


def text_rows(path: Path, name: str, unit: str) -> Iterator[Row]:
    """Yield the rows of a text file. `unit`: `document` (all), `paragraph` (text between blank lines) or `line`."""
    with reading(name), open(path, encoding="utf-8-sig", errors="surrogateescape") as file:
        if unit == "document":
            size = path.stat().st_size
            yield _too_long(name, size, "") if size > MAX_ROW_BYTES else _text_row(name, file.read())
            return
        paragraph: list[str] = []
        first = total = 1
        for number, (line, length) in enumerate(bounded_lines(file, "\n"), 1):
            if length > MAX_ROW_BYTES:
                yield _too_long(f"{name}:{number}", length, line)
            elif line.strip() and unit == "paragraph":
                first, total = (first, total + length) if paragraph else (number, length)
                if total <= 2 * MAX_ROW_BYTES:  # the paragraph is a bad row, and its rest is dropped
                    paragraph.append(line)
            elif line.strip():
                yield _text_row(f"{name}:{number}", line.rstrip("\n"))
            elif paragraph:
                yield _text_row(f"{name}:{first}", "".join(paragraph).rstrip("\n"))
                paragraph = []
        if paragraph:
            yield _text_row(f"{name}:{first}", "".join(paragraph).rstrip("\n"))


def _text_row(where: str, text: str) -> Row:
    if reason := unicode_fault(text):
        return bad_row(where, reason, text)
    size = len(text.encode())
    return _too_long(where, size, text) if size > MAX_ROW_BYTES else Row(where, {"text": text}, size=size)


def _too_long(where: str, size: int, text: str) -> Row:
    return bad_row(where, f"{too_long(size)}: set the source's text_unit to paragraph or line", text)
