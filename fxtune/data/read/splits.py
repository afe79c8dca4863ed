"""Finds the rows that `split` of a source selects, for data on this disk.

The datasets library parses the value: `train`, `train[:10%]`, `train[100:200]`, `train[-5%:]`, `train+test`.
folders.py says which files of a folder belong to a split. A file or a glob has one split, `train`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from fxtune.data.config import SourceConfig
from fxtune.data.read.folders import TRAIN, some
from fxtune.errors import DataError, first_line


@dataclass(frozen=True)
class RowRange:
    """Rows of one split, from `first` to `last` - 1."""

    split: str
    first: int
    last: int


def is_plain_split(split: str) -> bool:
    """Whether `split` is one split with all its rows."""
    return re.fullmatch(r"[\w.-]+", split) is not None


def split_names(config: SourceConfig) -> list[str]:
    """The splits that `config.split` names. Raises DataError if `config.split` cannot be parsed."""
    if is_plain_split(config.split):
        return [config.split]
    names = [part.partition("[")[0].strip() for part in config.split.split("+")]
    if not all(map(is_plain_split, names)):
        raise _wrong(config)
    return list(dict.fromkeys(names))


def row_ranges(config: SourceConfig, count: Callable[[str], int]) -> list[RowRange]:
    """The rows that `config.split` names, in order. `count` gives the number of rows of a split. Raises DataError."""
    from datasets import ReadInstruction

    counts = {name: count(name) for name in split_names(config)}
    try:
        found = ReadInstruction.from_spec(config.split).to_absolute(counts)
    except (ValueError, AssertionError) as error:
        raise _wrong(config, f" ({first_line(error)})") from error
    ranges = [RowRange(part.splitname, part.from_, part.to) for part in found]
    if not any(part.first < part.last for part in ranges):
        rows = ", ".join(f"{name} has {number:,} rows" for name, number in counts.items())
        raise DataError(f"{config.path}: split={config.split!r} names no row ({rows}). Correct the split.")
    return ranges


def require_no_hub_keys(config: SourceConfig, has_subsets: bool = False) -> None:
    """Raise DataError if `revision` is set, or `subset` without `has_subsets`: data on this disk has no such keys."""
    for key, value in (("subset", None if has_subsets else config.subset), ("revision", config.revision)):
        if value is not None:
            inner = Path(config.path) / value
            instead = f"name {inner if inner.exists() else 'the file or folder that you mean'} in `path`"
            raise DataError(
                f"{config.path} is on this disk and has no {key}: {key}={value!r} would be ignored. Remove it, or "
                f"{instead}."
            )


def require_split(config: SourceConfig, split: str, known: Collection[str], file_names: Sequence[str]) -> None:
    """Raise DataError if `split` is not among the splits that local data has."""
    if split in known:
        return
    if len(file_names) == 1 and set(known) == {TRAIN}:
        raise DataError(
            f"{config.path} is one file, and split={config.split!r} would be ignored. Use rows of it, as in "
            "`split: train[:10%]`, or name the file of that split in `path`."
        )
    raise DataError(
        f"{config.path} has no split {split!r}. Set the source's split to one that it has "
        f"({', '.join(known) or 'none'}), or name files in `path`. Its files: {some(file_names)}."
    )


def _wrong(config: SourceConfig, why: str = "") -> DataError:
    return DataError(
        f"{config.path}: split={config.split!r} is no split{why}. Write one as in train, train[:10%], train[100:200], "
        "train[-5%:] or train+test."
    )
