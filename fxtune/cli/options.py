"""Parses the values of the commands' own options, and writes the file of `--json`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from fxtune.errors import ConfigError, StorageError


def parse_int(option: str, text: str | None, default: int, least: int = 1) -> int:
    """The whole number in `text`, or `default` without one. Raises ConfigError unless it is `least` or more."""
    if text is None:
        return default
    if not text.isdigit() or int(text) < least:
        raise ConfigError(f"{option} {text}: give a whole number, {least} or more")
    return int(text)


def parse_positive(option: str, text: str | None, what: str) -> float | None:
    """The number above 0 in `text`; None if the option was not given. `what`: its meaning, for the ConfigError."""
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ConfigError(f"{option} {text}: give {what}, a number above 0")
    return value


def write_json(file: Path, value: Any) -> None:
    """Write `value` as JSON. Raises StorageError."""
    try:
        file.write_text(json.dumps(value, indent=1, default=str) + "\n", encoding="utf-8")
    except OSError as error:
        raise not_writable(file, error) from error


def require_writable(file: Path) -> None:
    """Raise StorageError if `file` cannot be written, before minutes of work. Its content stays."""
    existed = file.exists()
    try:
        with file.open("a"):
            pass
        if not existed:
            file.unlink()
    except OSError as error:
        raise not_writable(file, error) from error


def not_writable(file: Path, error: OSError) -> StorageError:
    return StorageError(f"--json {file} cannot be written: {error}. Give a file in a folder that exists.")
