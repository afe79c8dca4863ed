"""Finds the files of a subset and a split in a folder, by the rules of `datasets.load_dataset(folder, subset)`.

A dataset's README.md may declare subsets (`configs:` in its front matter, each with `data_files` or `data_dir`). If no
files are declared, names decide. Three patterns are tried in this order: `data/train-00000-of-00002.parquet`, folders
named by splits, files named by splits. If no name matches, every file belongs to split train.

`datasets.load_dataset_builder` has the same rules. It takes 25 s for a folder of 40,000 files, and this module 2 s. It
also fails for a folder with `[` in its path or with a Python file named like the folder, follows URLs and paths out of
the folder, and writes to a cache. tests/data/read/test_folders.py compares this module with the library.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from fxtune.data.read.files import require_file
from fxtune.errors import DataError, first_line

TRAIN = "train"
KEYWORDS = {
    TRAIN: ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""For each split, the words in names of files and folders that mean this split."""
DEFAULT = "default"
"""The subset that is read if the source names none. A folder that declares no subsets has this subset only."""
CARD = "README.md"
MAX_CARD_BYTES = 16 << 20
_SEPARATOR = "[-._ 0-9]"
# Matches a part of a path with a keyword. Each group is one of the globs that `datasets` tries, in the same order.
_WORDS = {
    split: re.compile(
        "|".join(
            f"({word})|({word}{_SEPARATOR}.*)|(.*{_SEPARATOR}{word})|(.*{_SEPARATOR}{word}{_SEPARATOR}.*)"
            for word in words
        )
    )
    for split, words in KEYWORDS.items()
}
_SHARD = re.compile(r"data/(?P<split>[^/]+)-\d{5}-of-\d{5}[^/]*\.[^/]*")
_SPLIT = re.compile(r"\w+(\.\w+)*")
# Keys of an entry of `configs` that fxtune reads, or that do not change the text of rows.
_KNOWN_KEYS = {
    *("config_name", "data_files", "data_dir", "default", "features"),
    *("version", "description", "license", "drop_labels", "drop_metadata"),
}


@dataclass(frozen=True)
class Subset:
    """One subset of a folder. `splits`: the files of each split, as paths relative to the folder."""

    name: str
    splits: dict[str, list[str]]
    others: list[str] = field(default_factory=list)
    """Names of the folder's other subsets."""
    unread: list[str] = field(default_factory=list)
    """Keys of the subset's entry in README.md that fxtune does not read."""


def find_subset(folder: Path, wanted: str | None, names: Sequence[str]) -> Subset:
    """Find the subset `wanted` of a folder (None: the default one). `names`: its data files, as paths with slashes.

    Raises DataError if there is no such subset, no single default subset, or README.md cannot be read.
    """
    names = sorted(names)  # sorted as text, like `datasets`; Path objects would sort a/x before a-b/x
    configs, defaults = _declared(folder)
    if not configs:
        configs, defaults = {DEFAULT: {}}, [DEFAULT]
    subsets = ", ".join(configs)
    if wanted is not None and wanted not in configs:
        raise DataError(f"{folder} has no subset {wanted!r}. Set the source's subset to one that it has: {subsets}.")
    if wanted is None and not defaults:
        raise DataError(
            f"{folder} has several subsets, and its {CARD} names none as the default: {subsets}. Set the source's "
            f"subset to a name of this list, as in subset={next(iter(configs))}."
        )
    if wanted is None and len(defaults) > 1:
        raise DataError(
            f"{folder / CARD} names several default subsets: {', '.join(defaults)}. Set the source's subset to one."
        )
    name = defaults[0] if wanted is None else wanted
    config = configs[name]
    splits = _splits_of_config(folder, name, config, names)
    return Subset(
        name, splits, [other for other in configs if other != name], sorted(map(str, set(config) - _KNOWN_KEYS))
    )


def splits_by_name(names: Sequence[str]) -> dict[str, list[str]]:
    """The files of each split, by their names alone."""
    names = [name for name in names if not _special(name)]
    shards = [(match["split"], name) for name in names if (match := _SHARD.fullmatch(name))]
    if shards and all(_SPLIT.fullmatch(split) for split, _ in shards):
        found = {split for split, _ in shards}
        ordered = [*(split for split in KEYWORDS if split in found), *sorted(found - set(KEYWORDS))]
        return {split: [name for own, name in shards if own == split] for split in ordered}
    # `datasets` reads no Markdown. A Markdown file is named by its subject, so testing.md is no test split.
    paths = [(name, PurePosixPath(name).parts) for name in names if not name.lower().endswith(".md")]
    for part in (slice(None, -1), slice(-1, None)):  # folder names are tried before file names
        splits = {split: _with_word(word, paths, part) for split, word in _WORDS.items()}
        if any(splits.values()):
            return {split: own for split, own in splits.items() if own}
    return {TRAIN: list(names)}


def _with_word(word: re.Pattern[str], paths: Sequence[tuple[str, Sequence[str]]], part: slice) -> list[str]:
    """The names that match `word` in this part of their path, sorted by the first glob that matches."""
    found = (
        (name, [match.lastindex or 0 for match in map(word.fullmatch, path[part]) if match]) for name, path in paths
    )
    return [name for name, ranks in sorted(found, key=lambda entry: min(entry[1], default=0)) if ranks]


def describe(
    subset: Subset, asked: Sequence[str], chosen: Sequence[str], names: Sequence[str], packed: Sequence[str]
) -> str:
    """A line about the files that are read and left out, and about files and keys that fxtune cannot read; empty if
    there are only files that are read. `packed`: compressed files of the folder that fxtune does not read."""
    lines = [f"not unpacked and not read: {some(packed)}"] if packed else []
    if subset.unread:
        lines.append(f"{CARD} sets {', '.join(subset.unread)} for subset {subset.name}, which fxtune does not read")
    if len(chosen) == len(names) and not subset.others:
        return "; ".join(lines)
    read = set(chosen)
    others = {split: [name for name in own if name not in read] for split, own in subset.splits.items()}
    left = [
        f"split {split} ({len(own)} file{'s' * (len(own) != 1)})"
        for split, own in others.items()
        if own and split not in asked
    ]
    left += [f"subset {other}" for other in subset.others]
    if not subset.others:  # otherwise the remaining files may belong to other subsets
        known = {name for own in subset.splits.values() for name in own}
        left += [some(unnamed)] if (unnamed := [name for name in names if name not in known]) else []
    where = f" of subset {subset.name}" if subset.others else ""
    line = f"split {' and '.join(asked)}{where} is {len(chosen)} of {len(names)} files: {some(chosen)}"
    return "; ".join([f"{line}. Left out: {', '.join(left)}" if left else line, *lines])


def some(names: Sequence[str]) -> str:
    """The first names of a list, and how many more there are."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _declared(folder: Path) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Returns ({name: entry of `configs`}, the names of default entries). Raises DataError."""
    front_matter = _front_matter(folder)
    entries = front_matter.get("configs") or []
    # The error does not print a value of a wrong type: with aliases, a few lines of YAML may be a list of gigabytes.
    if not isinstance(entries, list) or not all(
        isinstance(entry, dict)
        and isinstance(entry.get("config_name"), (str, int, float))
        and isinstance(entry.get("data_dir") or "", str)
        for entry in entries
    ):
        raise _wrong(folder, "`configs` is no list of entries, each with a config_name and perhaps a data_dir")
    configs = {str(entry["config_name"]): entry for entry in entries}
    defaults = [
        name for name, entry in configs.items() if len(configs) == 1 or name == DEFAULT or entry.get("default")
    ]
    infos = front_matter.get("dataset_info")
    infos = [infos] if isinstance(infos, dict) else infos
    if not defaults and isinstance(infos, list) and len(infos) == 1 and isinstance(infos[0], dict):
        defaults = [name for name in configs if name == infos[0].get("config_name")]
    return configs, defaults


def _front_matter(folder: Path) -> dict[str, Any]:
    import yaml
    from huggingface_hub import metadata_load

    found: dict[str, Any] = {}
    # Both files may declare subsets. .huggingface.yaml overrides README.md, as in `datasets`.
    for name, read in ((CARD, metadata_load), (".huggingface.yaml", lambda path: yaml.safe_load(path.read_bytes()))):
        path = folder / name
        require_file(path)
        if not path.exists():
            continue
        if path.stat().st_size > MAX_CARD_BYTES:
            raise _wrong(folder, f"it has more than {MAX_CARD_BYTES >> 20} MiB", name)
        try:
            values = read(path)
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as problem:
            raise _wrong(folder, f"its front matter cannot be read ({first_line(problem)})", name) from problem
        if isinstance(values, dict):
            found |= values
    return found


def _splits_of_config(folder: Path, subset: str, config: dict[str, Any], names: Sequence[str]) -> dict[str, list[str]]:
    """The files of each split of subset `subset`, which the entry `config` declares. Raises DataError."""
    below = PurePosixPath(config.get("data_dir") or ".")
    inner = {
        name: str(path.relative_to(below)) for name in names if (path := PurePosixPath(name)).is_relative_to(below)
    }
    if config.get("data_files") is None:
        splits = splits_by_name(list(inner.values()))
        by_inner = {short: name for name, short in inner.items()}
        return {split: [by_inner[short] for short in own] for split, own in splits.items() if own}
    splits = {}
    for split, patterns in _patterns(folder, subset, config["data_files"]).items():
        own: dict[str, None] = {}
        for pattern in patterns:
            parts = PurePosixPath(pattern).parts
            found = [name for name, short in inner.items() if _matches(PurePosixPath(short).parts, parts)]
            found = [name for name in found if _special(inner[name]) == _special(pattern)]
            if not found and not any(mark in pattern for mark in "*?["):
                raise _wrong(folder, f"subset {subset} names {pattern}, which is no data file of the folder")
            own |= dict.fromkeys(found)
        splits[split] = list(own)
    return splits


def _patterns(folder: Path, subset: str, data_files: Any) -> dict[str, list[str]]:
    """The globs of each split, from `data_files` of an entry. Raises DataError."""
    listed = data_files if isinstance(data_files, list) else [data_files]
    if all(isinstance(entry, str) for entry in listed):
        splits = {TRAIN: listed}
    else:
        splits = {}
        for entry in listed:
            if not isinstance(entry, dict) or set(entry) != {"split", "path"}:
                raise _wrong(
                    folder, f"`data_files` of subset {subset} is no path, list of paths or list of split and path"
                )
            split, path = entry["split"], entry["path"]
            if not isinstance(split, str) or not _SPLIT.fullmatch(split) or split in splits:
                raise _wrong(
                    folder, f"subset {subset} names a split twice, or one with other characters than a-z0-9_."
                )
            splits[split] = path if isinstance(path, list) else [path]
    for pattern in (pattern for patterns in splits.values() for pattern in patterns):
        if not isinstance(pattern, str):
            raise _wrong(folder, f"subset {subset} has a value in `data_files` that is no path")
        if any("**" in part and part != "**" for part in PurePosixPath(pattern).parts):
            raise _wrong(folder, f"subset {subset} has {pattern!r}; ** stands for whole folders, as in **/*.jsonl")
    return splits


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether the parts of a path match the parts of a glob. `**` stands for any number of folders."""
    reached = {0}
    for word in pattern:
        if word == "**":
            reached = {end for start in reached for end in range(start, len(parts) + 1)}
        else:
            reached = {start + 1 for start in reached if start < len(parts) and fnmatchcase(parts[start], word)}
    return len(parts) in reached


def _special(path: str) -> int:
    """The number of folders in a path that begin with two underscores. Globs match paths with the same number."""
    return sum(part.startswith("__") for part in PurePosixPath(path).parent.parts)


def _wrong(folder: Path, why: str, file: str = CARD) -> DataError:
    return DataError(f"{folder / file}: {why}. Correct it, or name the data files themselves in `path`, as a glob.")
