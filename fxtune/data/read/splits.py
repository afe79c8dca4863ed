"""What `split` of a source means for data on this disk: which files, and which of their rows.

A split is written as in the datasets library, whose parser is used: `train`, `train[:10%]`, `train[100:200]`,
`train[-5%:]`, `train+test`. A folder has splits if its files are named by them, as train.jsonl and test.jsonl or as
data/validation-00000.parquet; the last part of the path that holds such a word counts. `train` means all files, unless
every file of a folder names a split. A split that the data does not have is an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fxtune.data.config import SourceConfig
from fxtune.errors import DataError, first_line

TRAIN = "train"
SYNONYMS = {
    TRAIN: ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Words in the name of a file or a folder, as the datasets library knows them."""


@dataclass(frozen=True)
class RowRange:
    """Rows of one split, `last` excluded."""

    split: str
    first: int
    last: int


def is_whole(split: str) -> bool:
    """Whether `split` is one split with all its rows."""
    return re.fullmatch(r"[\w.-]+", split) is not None


def split_names(config: SourceConfig) -> list[str]:
    """The splits that `config.split` names. Raises DataError if it is not written as one."""
    if is_whole(config.split):
        return [config.split]
    names = [part.partition("[")[0].strip() for part in config.split.split("+")]
    if not all(map(is_whole, names)):
        raise _wrong(config)
    return list(dict.fromkeys(names))


def row_ranges(config: SourceConfig, count: Callable[[str], int]) -> list[RowRange]:
    """The rows that `config.split` names, in order. `count`: the number of rows of a split."""
    from datasets import ReadInstruction

    counts = {name: count(name) for name in split_names(config)}
    try:
        found = ReadInstruction.from_spec(config.split).to_absolute(counts)
    except (ValueError, AssertionError) as error:
        raise _wrong(config, f" ({first_line(error)})") from error
    ranges = [RowRange(one.splitname, one.from_, one.to) for one in found]
    if not any(one.first < one.last for one in ranges):
        rows = ", ".join(f"{name} has {number:,} rows" for name, number in counts.items())
        raise DataError(f"{config.path}: split={config.split!r} names no row ({rows}). Correct the split.")
    return ranges


def require_no_hub_keys(config: SourceConfig) -> None:
    """Raise DataError for keys that only a dataset of the hub has."""
    for key, value in (("subset", config.subset), ("revision", config.revision)):
        if value is not None:
            inner = Path(config.path) / value
            instead = f"name {inner if inner.exists() else 'the file or folder that you mean'} in `path`"
            raise DataError(
                f"{config.path} is on this disk, and only a dataset of the hub has a {key}: {key}={value!r} would be "
                f"ignored. Remove it, or {instead}."
            )


def files_of_split(config: SourceConfig, split: str, names: Sequence[str], is_folder: bool) -> list[int]:
    """The indices of the files that belong to `split`. `names`: their paths, below the folder if it is one.

    Raises DataError if there are none.
    """
    splits = [_split_of(name, split) for name in names]
    own = [index for index, found in enumerate(splits) if found == _canonical(split)]
    everything = list(range(len(names)))
    if _canonical(split) == TRAIN and not (is_folder and own and all(splits)):
        return everything
    if own:
        return own
    known = sorted({found for found in splits if found})
    if len(names) == 1:
        raise DataError(
            f"{config.path} is one file, and split={config.split!r} would be ignored. Use rows of it, as in "
            f"`split: train[:10%]`, or name the file of that split in `path`."
        )
    there = f"Its files: {_some(names)}."
    if known:
        there = f"Set the source's split to one that it has: {', '.join(known)}."
    raise DataError(f"{config.path} has no split {split!r}: no file is named by it. {there}")


def describe_files(split: str, names: Sequence[str], chosen: Sequence[int]) -> str:
    """The files of a split, for a user."""
    return f"split {split} is {len(chosen)} of {len(names)} files: {_some([names[index] for index in chosen])}"


def _split_of(name: str, asked: str) -> str | None:
    """The split that a path names, in its last part that names one."""
    words = {word: split for split, synonyms in SYNONYMS.items() for word in synonyms} | {asked: _canonical(asked)}
    for part in reversed(Path(name.lower()).parts):
        for word in (part.partition(".")[0], *re.split(r"[-._ \d]+", part)):
            if word in words:
                return words[word]
    return None


def _canonical(split: str) -> str:
    return next((name for name, synonyms in SYNONYMS.items() if split in synonyms), split)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _wrong(config: SourceConfig, why: str = "") -> DataError:
    return DataError(
        f"{config.path}: split={config.split!r} is no split{why}. Write one as in train, train[:10%], train[100:200], "
        "train[-5%:] or train+test."
    )
