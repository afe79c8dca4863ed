"""Where rows come from: files, folders, globs and hub ids.

| kind    | files                               | how it is read                                                                |
|---------|-------------------------------------|-------------------------------------------------------------------------------|
| jsonl   | .jsonl .ndjson, also with .gz       | an object a line, blank lines ignored; plain files in parallel, by byte ranges |
| json    | .json                               | an array of objects, or an object with one such array (or, misnamed, JSONL)   |
| parquet | .parquet                            | through Arrow, a small batch at a time                                        |
| csv     | .csv .tsv                           | a header line, every cell a string                                            |
| text    | .txt .md                            | documents, paragraphs or lines (`text_unit`)                                  |
| hub     | a dataset id, a save_to_disk folder | through `datasets`, memory-mapped                                             |

A row that cannot be read comes out as a `Row` with the reason, never as nothing. What a row means is formats.py's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

from fxtune.data.config import SourceConfig, TextUnit
from fxtune.data.read import files, hub_datasets, jsonl, readers
from fxtune.data.read.files import DataFile
from fxtune.data.read.formats import RowFormat, detect
from fxtune.data.read.jsonl import Row, Shard
from fxtune.errors import ConfigError, DataError

SHARD_BYTES = 1 << 20
"""Bytes of a JSONL file that one worker takes at a time: about a second's work, so that of 40 MB no worker of 16 gets much more
than another."""
ROW_SHARD_BYTES = 1 << 20
"""The same for rows that are read here and sent to a worker."""
HEAD_ROWS = 100
"""Rows looked at to detect the format."""


@dataclass
class Source:
    """An opened source: its files exist and are of one kind. They are read when rows are asked for."""

    config: SourceConfig
    kind: str
    """jsonl, json, parquet, csv, text or hub."""
    files: list[DataFile]
    dataset: Any = None
    """The `datasets.Dataset` of kind hub."""

    @property
    def name(self) -> str:
        """What the user wrote."""
        return self.config.path

    @property
    def size(self) -> int:
        """Bytes to read, about."""
        return sum(file.end for file in self.files)

    def shards(self) -> Iterator[Shard]:
        """The source in pieces, in order. Each can be read in another process, and is a few megabytes (or one row) at most."""
        if self.kind == "jsonl" and (self.config.limit is None or not any(file.packed for file in self.files)):
            for file in self.files:
                if file.packed:
                    yield from jsonl.row_shards(self._read(file), ROW_SHARD_BYTES)
                else:
                    yield from jsonl.line_shards(file.path, file.name, file.end, SHARD_BYTES, self.config.columns)
            return
        if self.kind == "hub":
            read = jsonl.renamed(hub_datasets.rows(self.dataset, self.name, self.config.limit), self.config.columns)
        else:
            read = (row for file in self.files for row in self._read(file))
        yield from jsonl.row_shards(islice(read, self.config.limit), ROW_SHARD_BYTES)

    def rows(self) -> Iterator[Row]:
        """All rows in order, the bad ones too."""
        for shard in self.shards():
            yield from shard.rows()

    def head(self, count: int = HEAD_ROWS) -> list[dict[str, Any]]:
        """The usable ones of the first `count` rows, at least one if any is. Raises DataError: there is no row, or none has a
        column that is to be renamed."""
        usable, looked_at = [], 0
        for row in replace(self, config=replace(self.config, columns={})).rows():
            looked_at += 1
            if row.value is not None:
                usable.append(row)
            if looked_at >= count and usable:  # where all are bad, look on: no format is found in bad rows
                break
        if not looked_at:
            raise DataError(f"{self.name} has no rows: nothing but blank lines, a header or an empty list.")
        seen = list(dict.fromkeys(key for row in usable for key in row.value or ()))
        for theirs in self.config.columns if usable else ():
            if theirs not in seen:
                raise DataError(
                    f"{self.name}: `columns` renames {theirs!r}, which none of the first {looked_at} rows has"
                    f"{files.nearest(theirs, seen)}. Their columns: {', '.join(seen)}."
                )
        return [row.value for row in jsonl.renamed(usable, self.config.columns) if row.value is not None]

    def format(self) -> RowFormat:
        """The configured format, or the one that the first rows have. Raises DataError where they have none."""
        head = self.head()
        if self.config.format is not RowFormat.auto:
            return self.config.format
        # With nothing but bad rows, any format will do: the first of them becomes the error.
        return detect(head, self.name) if head else RowFormat.text

    def content_key(self) -> str:
        """A hash of all bytes that are used, the same for a copy under another name. About 1 s a GB and core."""
        key = blake2b(self.kind.encode(), digest_size=16)
        if self.kind == "hub":
            key.update(repr((self.config.split, len(self.dataset))).encode())
        for file in self.files:
            key.update(f"{file.packed} {file.digest()}".encode())
        return key.hexdigest()

    def require_unchanged(self) -> None:
        """Raise DataError where a file was written to since the source was opened."""
        for file in self.files:
            file.require_unchanged()

    def describe(self) -> str:
        """One line for people."""
        count = f"{len(self.dataset):,} rows" if self.kind == "hub" else f"files: {len(self.files):,}"
        return f"{self.name} ({self.kind}, {count}, {self.size / 1e6:,.1f} MB)"

    def _read(self, file: DataFile) -> Iterator[Row]:
        if self.kind == "text":
            read = readers.text_rows(file.path, file.name, TextUnit(self.config.text_unit).value)
        else:
            read = {
                "jsonl": jsonl.line_file_rows,
                "json": readers.json_rows,
                "csv": readers.csv_rows,
                "parquet": readers.parquet_rows,
            }[self.kind](file.path, file.name)
        return jsonl.renamed(read, self.config.columns)


def open_source(config: SourceConfig, cache_dir: Path | None = None) -> Source:
    """Find what `config.path` names. `cache_dir`: where `datasets` keeps hub data (None: its own place).

    Raises:
        ConfigError: weight or limit is not positive.
        DataError: nothing there, an empty file, kinds mixed, or a hub that cannot be reached. The message says what to change.
    """
    if config.weight is not None and not config.weight > 0:
        raise ConfigError(
            f"data source {config.path}: weight={config.weight} must be above 0. To leave a source out, remove it."
        )
    if config.limit is not None and config.limit < 1:
        raise ConfigError(f"data source {config.path}: limit={config.limit} must be at least 1; null uses every row.")
    path = files.expanded(config.path)
    if os.path.isfile(path / "dataset_dict.json"):  # DatasetDict.save_to_disk: a folder for each split
        splits = sorted(folder.parent.name for folder in path.glob("*/state.json"))
        if config.split not in splits:
            raise DataError(
                f"{config.path} has no split {config.split!r}. Set the source's split to one that it has: "
                f"{', '.join(splits) or 'none'}."
            )
        path /= config.split
    if os.path.isfile(path / "state.json") and os.path.isfile(path / "dataset_info.json"):
        return _of_dataset(config, hub_datasets.load_saved(path))
    found = files.find(config.path)
    if found is None:
        return _of_dataset(
            config, hub_datasets.load(config.path, config.subset, config.split, config.revision, cache_dir)
        )
    held = files.sort_out(config.path, found, config.limit)
    return Source(config, held[0].kind, held)


def missing_reason(config: SourceConfig, cache_dir: Path | None = None) -> str | None:
    """Why there is nothing behind `config.path`, as far as can be told while the hub does not answer; None: no reason."""
    try:
        if files.find(config.path) is not None:
            return None
    except DataError as error:
        return str(error)
    return hub_datasets.absent(config.path, config.subset, config.split, config.revision, cache_dir)


def _of_dataset(config: SourceConfig, dataset: Any) -> Source:
    if len(dataset) == 0:
        raise DataError(f"{config.path}: split {config.split} has no rows.")
    return Source(config, "hub", [files.at(path, "arrow") for path in hub_datasets.files(dataset)], dataset)
