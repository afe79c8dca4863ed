"""What the rows of a file are: their format, their number, the tokens of their documents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np

from fxtune.data.config import DataConfig, SourceConfig
from fxtune.data.formats.image_parts import COLUMNS, IMAGE
from fxtune.data.formats.registry import row_format, suggested_columns
from fxtune.data.formats.row_format import RowFormat
from fxtune.data.read.sources import open_source
from fxtune.data.tokenized.tokenize import tokenize
from fxtune.models.load import ModelConfig, load_tokenizer
from fxtune.settle.images import image_processor

NO_LIMIT = 2**24
"""Tokens: no document is cut where lengths are counted."""
MOST_ROWS = 20_000
"""Rows that are tokenized to know the lengths; a larger file is extrapolated."""


@dataclass(frozen=True)
class Rows:
    source: SourceConfig
    format: RowFormat
    count: int
    """Rows of the file."""
    head: list[dict[str, Any]] = field(repr=False)
    """The first usable rows."""

    @property
    def has_images(self) -> bool:
        return any(column in row for row in self.head for column in COLUMNS) or IMAGE in str(self.head[:10])

    @property
    def objective(self) -> str:
        return {0: "causal_lm", 1: "kto"}.get(len(self.format.answers), "dpo")

    @property
    def are_chats(self) -> bool:
        """Whether rows are questions of text with their answers, so that copies of rows elsewhere can be asked. The
        path of an image is relative to the file of its row."""
        return not (self.format.answers or self.has_images) and self.format.name not in ("text", "tokens")

    def lengths(self, model: ModelConfig) -> np.ndarray:
        """Tokens of each document, int64 [documents], of the first MOST_ROWS rows. Raises the errors of reading the
        tokenizer, and DataError for a row that cannot be used."""
        tokenizer = load_tokenizer(model)
        data = DataConfig(sources=[self.source], sequence_length=NO_LIMIT)
        images = image_processor(model, data, tokenizer) if self.has_images else None
        table = tokenize(replace(self.source, limit=min(self.count, MOST_ROWS)), data, tokenizer, None, False, images)
        return np.diff(table.offsets)


def read_rows(path: str) -> Rows:
    """The rows of a file, a folder or a dataset. Raises DataError if they are nothing that fxtune knows."""
    config = SourceConfig(path=path)
    source = open_source(config)
    head = source.head()
    names = list(dict.fromkeys(key for row in head for key in row))
    if not any(row_format(row) for row in head) and (columns := suggested_columns(head, names)):
        config = replace(config, columns=columns)
        source = open_source(config)
        head = source.head()
    count = len(source.dataset) if source.kind == "hub" else source.count(source.files)
    return Rows(config, source.format(), count, head)


def spread(rows: Rows, count: int) -> list[Mapping[str, Any]]:
    """`count` rows, evenly over the file."""
    every = max(1, rows.count // count)
    chosen = islice(open_source(rows.source).rows(), 0, None, every)
    return [row.value for row in islice(chosen, count) if row.value is not None]
