"""A source of rows: files, a folder, a glob or a dataset of the hub.

| kind    | files                               | how it is read                                                      |
|---------|-------------------------------------|---------------------------------------------------------------------|
| jsonl   | .jsonl .ndjson, also with .gz       | an object a line, blank lines ignored; uncompressed in parallel     |
| json    | .json                               | an array of objects, or an object with one such array; JSONL passes |
| parquet | .parquet                            | through Arrow, a small batch at a time                              |
| csv     | .csv .tsv                           | a header line, every cell a string                                  |
| text    | .txt .md                            | documents, paragraphs or lines (`text_unit`)                        |
| hub     | a dataset id, a save_to_disk folder | through `datasets`, memory-mapped                                   |

A row that cannot be read becomes a `Row` with the reason. data/formats decides what a row means.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from itertools import chain, islice
from pathlib import Path
from typing import Any

from fxtune.data.config import DataConfig, SourceConfig, TextUnit
from fxtune.data.formats.registry import FORMATS, detect_format, preference_columns, row_format
from fxtune.data.formats.row_format import LearnConfig, RowFormat
from fxtune.data.formats.values import RowError
from fxtune.data.read import files, folders, hub_datasets, splits
from fxtune.data.read.arrow import parquet_rows
from fxtune.data.read.delimited import csv_rows
from fxtune.data.read.files import DataFile
from fxtune.data.read.json_array import json_rows
from fxtune.data.read.jsonl import LineShard, jsonl_rows, line_shards
from fxtune.data.read.row import Reading, Row, RowShard, lifted, row_shards
from fxtune.data.read.text import text_rows
from fxtune.errors import DataError, nearest

SHARD_BYTES, SHARD_BYTES_WITH_IMAGES = 1 << 20, 16 << 10
"""The bytes of a shard: about a second of work for a worker. With images: about a hundred rows that name an image."""
HEAD_ROWS, HEAD_BYTES, HEAD_FILES = 100, 64 << 20, 16
"""At most this many rows and bytes are read to detect the format, and so many files of a source are compared."""

Shard = LineShard | RowShard


@dataclass
class Source:
    """An opened source: its files exist and are of one kind. No row is read yet."""

    config: SourceConfig
    kind: str
    """jsonl, json, parquet, csv, text or hub."""
    files: list[DataFile]
    dataset: Any = None
    """The `datasets.Dataset` of kind hub."""
    parts: list[tuple[list[DataFile], int, int]] = field(default_factory=list)
    """(files, first row, last row + 1) for each part of a split like `train[:10%]` or `train+test`; else empty."""
    remark: str = ""
    """Which files and keys of a folder are read and which are left out; empty if all are read."""
    splits: tuple[str, ...] = ()
    """The splits of a folder that have files."""
    keeps_images: bool = False
    """Whether columns of images that `datasets` wrote are read."""
    as_they_are: bool = False
    """Whether rows stay as they are: neither a plugin nor fxtune converts them."""

    @property
    def name(self) -> str:
        """The path as the user wrote it."""
        return self.config.path

    @property
    def size(self) -> int:
        """Approximate bytes to read."""
        return sum(file.size for file in self.files)

    @property
    def file_names(self) -> list[str]:
        """The names with which `Row.where` may begin: names of files, or of the dataset."""
        return [self.name] if self.kind == "hub" else [file.name for file in self.files]

    @property
    def folders(self) -> dict[str, Path]:
        """The folder of each file of `file_names`; empty for kind hub."""
        return {} if self.kind == "hub" else {file.name: file.path.parent for file in self.files}

    @property
    def _reading(self) -> Reading:
        form = FORMATS.get(self.config.format)
        keeps = self.as_they_are or (form is not None and form.keeps_names)
        plugin = None if keeps else self.config.plugin_format
        return Reading(self.config.columns, plugin, tuple(self.config.unused), self.keeps_images)

    def shards(self) -> Iterator[Shard]:
        """Yield the source in shards for workers, in order. A shard has a few megabytes at most, or a single row."""
        limit = self.config.limit
        shard_bytes = SHARD_BYTES_WITH_IMAGES if self.keeps_images else SHARD_BYTES
        at_once = self.kind == "jsonl" and not self.parts
        if at_once and (limit is None or not any(file.compressed for file in self.files)):
            for file in self.files:
                if file.compressed:
                    yield from row_shards(self._read([file]), shard_bytes)
                else:
                    yield from line_shards(file.path, file.name, file.size, shard_bytes, self._reading)
        else:
            yield from row_shards(islice(self._read_parts(), limit), shard_bytes)

    def rows(self) -> Iterator[Row]:
        """All rows in order, bad rows included."""
        for shard in self.shards():
            yield from shard.rows()

    def head(self, count: int = HEAD_ROWS) -> list[dict[str, Any]]:
        """The usable rows among the first `count` rows. If all of these are bad, rows are read up to the first usable
        row. Raises DataError if there is no row, or if no row has a column that `columns` renames."""
        usable, rows_read, size = [], 0, 0
        for row in replace(self, config=replace(self.config, columns={}), as_they_are=True).rows():
            rows_read, size = rows_read + 1, size + row.size
            if row.value is not None:
                usable.append(row)
            if usable and (rows_read >= count or size > HEAD_BYTES):  # a bad row has no format
                break
        if not rows_read:
            raise DataError(f"{self.name} has no rows: nothing but blank lines, a header or an empty list.")
        columns = list(dict.fromkeys(key for row in usable for key in row.value or ()))
        for column in self.config.columns if usable else ():
            if not any(column in lifted(row.value or {}, column) for row in usable):
                close = nearest(column, columns)
                raise DataError(
                    f"{self.name}: `columns` renames {column!r}, which none of the first {rows_read} rows has"
                    f"{f'; did you mean {close!r}?' if close else '.'} Their columns: {', '.join(columns)}. "
                    f"Without the recipe's `columns` it is a new source: 'data.sources=[{{path: {self.name}}}]'."
                )
        rows = self._reading.read(usable)
        return [row.value for row in rows if row.value is not None]

    def format(self) -> RowFormat:
        """The configured format, or else the format of the first rows. Raises DataError if the rows have no known
        format, or if rows of preferences would be read by a format for other rows."""
        unused, given = set(self.config.unused), FORMATS.get(self.config.format)
        head = [{key: value for key, value in row.items() if key not in unused} for row in self.head()]
        formats = [row_format(row) for row in head]
        most = given or (detect_format(head, self.name) if any(formats) else None)
        # If most rows are preferences, rows of other kinds are bad rows, and the encoder reports them.
        for row in [] if most and most.answers else head:
            own = given or row_format(row)
            if own and own.answers:
                continue
            if reason := preference_columns(row, own.known_columns if own else ()):
                raise DataError(f"{self.name}: {reason}.")
        # If all rows are bad, any format will do: the first bad row becomes the error.
        found = detect_format(head, self.name, self.config.columns) if head and not given else FORMATS["text"]
        return self._of_all_files(given or found)

    def _of_all_files(self, form: RowFormat) -> RowFormat:
        """`form`. Raises DataError if `form` reads rows of a file, and none of the first rows of another file. Of many
        files it compares HEAD_FILES. It skips a large array of JSON, which would be read as a whole."""
        first = dict[str, str]()  # format: its first file; empty: no format
        compared = [file for file in self.files if self.kind != "json" or file.size <= HEAD_BYTES]
        compared = compared[:: -(-len(compared) // HEAD_FILES) or 1]
        for file in compared if self.kind not in ("hub", "text") and len(compared) > 1 else ():
            found = None
            for value in (row.value for row in islice(self._read([file]), HEAD_ROWS) if row.value is not None):
                with suppress(RowError):  # some formats read rows of others, too
                    form.read(value, LearnConfig(), self.config.unused)
                    found = form
                    break
                found = found or row_format(value)
            first.setdefault(found.name if found else "", file.name)
        if form.name in first and len(first.keys() - {""}) > 1:
            shown = " and ".join(f"{file} has the columns of {name}" for name, file in first.items() if name)
            raise DataError(f"{self.name}: {shown}. Make each file a source: 'data.sources=[{{path: FILE}}, ...]'.")
        return form

    def content_key(self) -> str:
        """A hash of the bytes that are read. The names of files do not change it."""
        key = blake2b(self.kind.encode(), digest_size=16)
        if self.kind == "hub":
            key.update(repr((self.config.split, len(self.dataset))).encode())
        numbers = {file.path: number for number, file in enumerate(self.files)} if self.parts else {}
        for part, first, last in self.parts:
            key.update(repr(([numbers[file.path] for file in part], first, last)).encode())
        for file in self.files:
            key.update(f"{file.compressed} {file.digest()}".encode())
        return key.hexdigest()

    def describe(self) -> str:
        count = f"{len(self.dataset):,} rows" if self.kind == "hub" else f"files: {len(self.files):,}"
        return f"{self.name} ({self.kind}, {count}, {self.size / 1e6:,.1f} MB)"

    def count(self, data_files: list[DataFile]) -> int:
        """The number of rows in `data_files`, with bad rows."""
        return sum(1 for _ in self._read(data_files))

    def _read_parts(self) -> Iterator[Row]:
        if not self.parts:
            yield from self._read(self.files)
        for data_files, first, last in self.parts:
            yield from islice(self._read(data_files), first, last)

    def _read(self, data_files: Iterable[DataFile]) -> Iterator[Row]:
        if self.kind == "hub":
            rows = hub_datasets.dataset_rows(self.dataset, self.name, self.config.limit, self.keeps_images)
        else:
            readers: dict[str, Callable[[Path, str], Iterator[Row]]] = {
                "jsonl": partial(jsonl_rows, keeps_images=self.keeps_images),
                "json": json_rows,
                "csv": csv_rows,
                "parquet": partial(parquet_rows, keeps_images=self.keeps_images),
                "text": partial(text_rows, unit=TextUnit(self.config.text_unit).value),
            }
            rows = (row for file in data_files for row in readers[self.kind](file.path, file.name))
        return self._reading.read(rows)


def open_source(config: SourceConfig, cache_dir: Path | None = None) -> Source:
    """Find the data that `config.path` names. `cache_dir`: where `datasets` keeps hub data (None: its default).

    Raises DataError if the path does not exist, a file is empty, kinds are mixed, or the hub cannot be reached.
    """
    path = files.expand_path(config.path)
    if (dataset := _open_saved(config, path)) is None:
        if (found := files.find_files(config.path)) is not None:
            return _open_files(config, path, found)
        dataset = hub_datasets.load(config, cache_dir)
    if len(dataset) == 0:
        raise DataError(f"{config.path}: split {config.split} has no rows.")
    arrow_files = [files.data_file(path, "arrow") for path in hub_datasets.arrow_files(dataset)]
    return Source(config, "hub", arrow_files, dataset)


def _open_saved(config: SourceConfig, path: Path) -> Any:
    """The dataset in a folder of `save_to_disk`; None if `path` is no such folder. Raises DataError."""
    if os.path.isfile(path / "dataset_dict.json"):  # DatasetDict: a folder for each split
        there = sorted(folder.parent.name for folder in path.glob("*/state.json"))
        if missing := [name for name in splits.split_names(config) if name not in there]:
            raise DataError(
                f"{config.path} has no split {missing[0]!r}. Set the source's split to one that it has: "
                f"{', '.join(there) or 'none'}."
            )
        saved = {name: hub_datasets.load_saved(path / name) for name in splits.split_names(config)}
    elif os.path.isfile(path / "state.json") and os.path.isfile(path / "dataset_info.json"):
        dataset = hub_datasets.load_saved(path)
        own = {folders.TRAIN, str(dataset.split)}
        if other := [name for name in splits.split_names(config) if name not in own]:
            raise DataError(f"{config.path} is one split ({dataset.split or folders.TRAIN}), and not {other[0]!r}.")
        saved = dict.fromkeys(splits.split_names(config), dataset)
    else:
        return None
    splits.require_no_hub_keys(config)
    if splits.is_plain_split(config.split):
        return saved[config.split]
    import datasets

    ranges = splits.row_ranges(config, lambda name: len(saved[name]))
    parts = [saved[part.split].select(range(part.first, part.last)) for part in ranges]
    return datasets.concatenate_datasets(parts)


def _open_files(config: SourceConfig, path: Path, found: list[Path]) -> Source:
    """A source with the files and rows that `config.subset` and `config.split` select."""
    is_folder = os.path.isdir(path)
    splits.require_no_hub_keys(config, has_subsets=is_folder)
    names = {(file.relative_to(path).as_posix() if is_folder else str(file)): file for file in found}
    data = files.without_companions(list(names)) or list(names)
    subset = folders.find_subset(path, config.subset, data) if is_folder else folders.Subset("", {folders.TRAIN: data})
    asked = splits.split_names(config)
    shown = data if is_folder else [names[name].name for name in data]
    there = tuple(name for name, own in subset.splits.items() if own)
    for split in asked:
        splits.require_split(config, split, there, shown)
    chosen = list(dict.fromkeys(chain.from_iterable(subset.splits[split] for split in asked)))

    is_plain = splits.is_plain_split(config.split)
    selected = files.select_data_files(
        config.path, [names[name] for name in chosen], config.limit if is_plain else None
    )
    source = Source(config, selected[0].kind, selected, splits=there)
    if not is_plain:
        by_path = {file.path: file for file in selected}
        own_files = {
            split: [by_path[names[name]] for name in subset.splits[split] if names[name] in by_path] for split in asked
        }
        ranges = splits.row_ranges(config, lambda split: source.count(own_files[split]))
        source.parts = [(own_files[part.split], part.first, part.last) for part in ranges]
    if is_folder:
        packed = [name for name in names if name.lower().endswith(files.PACKED) and name not in data]
        source.remark = folders.describe(subset, asked, chosen, data, packed)
    return source


def require_usable(data: DataConfig) -> None:
    """Raise DataError with the key of a source on this disk that cannot be opened, or whose rows have no format."""
    lists = {"sources": data.sources, "eval_sources": data.eval_sources}
    keys = {f"data.{name}.{at}": source for name, found in lists.items() for at, source in enumerate(found)}
    if path := data.applicable_questions().path:
        keys["data.questions"] = SourceConfig(path=path, limit=data.questions.limit)
    for key, config in keys.items():
        part = "path"
        try:
            found = files.find_files(config.path) or []
            # `datasets`, which reads .arrow, takes seconds to import. A slice of a split would count all rows.
            if found and splits.is_plain_split(config.split) and not any(path.suffix == ".arrow" for path in found):
                source = _open_files(config, files.expand_path(config.path), found)
                part, source.keeps_images = ("columns" if config.columns else "path"), True
                source.format()
        except DataError as error:
            raise DataError(f"{key}.{part}: {error}") from error


def missing_reason(config: SourceConfig, cache_dir: Path | None = None) -> str | None:
    """The reason why the data of `config.path` is not available; None if it is available. Downloads nothing."""
    try:
        if files.find_files(config.path) is not None:
            return None
    except DataError as error:
        return str(error)
    return hub_datasets.missing_reason(config, cache_dir)
