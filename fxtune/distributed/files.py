"""Writes files that an option names, such as --json FILE, on rank 0."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from fxtune.distributed.ranks import process_rank
from fxtune.errors import writing


def as_json(value: Any) -> str:
    """`value` as the text of a JSON file, with null for numbers that are not finite."""
    plain = json.loads(json.dumps(value, default=str), parse_constant=lambda _: None)
    return json.dumps(plain, indent=1, ensure_ascii=False) + "\n"


def write_json(file: Path, value: Any) -> None:
    """Write `value` as JSON, on rank 0 only. Raises StorageError if the file cannot be written."""
    write_text(file, as_json(value))


def write_text(file: Path, text: str, option: str = "--json") -> None:
    """Write `file`, the value of `option`, on rank 0 only. Raises StorageError if the file cannot be written."""
    if process_rank().rank:
        return
    with _writing(file, option):
        file.write_text(text, encoding="utf-8")


def require_writable(file: Path, option: str = "--json") -> None:
    """Raise StorageError if `file`, the value of `option`, cannot be written. Call this before minutes of work. The
    file keeps its content."""
    existed = file.exists()
    with _writing(file, option):
        file.open("a").close()
        if not existed:
            file.unlink(missing_ok=True)  # another rank may have removed the file


def _writing(file: Path, option: str) -> AbstractContextManager[None]:
    return writing(f"{option} {file} cannot be written", "or give a file in a folder that exists")
