"""Finds the row that a group of documents was made from: messages name its place, and `fxtune refresh` copies it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np

from fxtune.data.config import DataConfig, SourceConfig
from fxtune.data.read.row import Row
from fxtune.data.read.sources import open_source
from fxtune.data.tokenized.cache import cache_root
from fxtune.data.tokenized.table import TokenTable


def usable_rows(source: SourceConfig, table: TokenTable | None, data: DataConfig) -> Iterator[Row]:
    """Yield the row of each document of `table.by_row`, in order. `table`: the tokens of `source`, which list its bad
    rows; None if the source has no bad row."""
    opened = open_source(source, cache_root(data) / "datasets" if data.cache_dir else None)
    bad = {entry["where"] for entry in table.read_bad_rows(opened.file_names)} if table and table.bad_rows else set()
    return (row for row in opened.rows() if row.value is not None and row.where not in bad)


def place_of_row(source: SourceConfig, table: TokenTable | None, row: int, data: DataConfig) -> str:
    """File and line of row number `row` of `table.by_row`. `table`: as in usable_rows()."""
    return next(islice(usable_rows(source, table, data), row, None)).where


def place_of_image(source: SourceConfig, table: TokenTable, image: int, data: DataConfig) -> str:
    """File and line of the row with image number `image` of `table`."""
    document = int(np.searchsorted(table.offsets, table.image_starts[image], "right")) - 1
    if table.whole is None:
        row = int(np.searchsorted(table.groups, document, "right")) - 1
    else:  # each piece has the digest of its chat
        row = int(np.argmax(table.by_row.digests == table.digests[document]))
    return place_of_row(source, table, row, data)
