"""Reads Parquet files, and Arrow tables that `datasets` made."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from fxtune.data.formats.values import without_nulls
from fxtune.data.read.row import Row, bad_row, length_fault, longest_row, too_long
from fxtune.errors import DataError, first_line

Decoder = Callable[[Any], Iterable[dict[str, Any]]]
"""A function that turns an Arrow table into rows."""


def parquet_rows(path: Path, name: str, keeps_images: bool = False) -> Iterator[Row]:
    """Yield the rows of a Parquet file, a few at a time. In a file of `datasets`, columns are decoded, audio is left
    out, and images are left out unless `keeps_images`. Raises DataError."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        # The file is not mapped into memory: if a mapped file shrinks, the process ends (SIGBUS) without an error.
        with pq.ParquetFile(path, buffer_size=1 << 20) as file:
            decode, columns = _decoder(file.schema_arrow, name, keeps_images)
            for batch in file.iter_batches(batch_size=rows_at_once(keeps_images), columns=columns):
                for row in arrow_rows(batch, name, number, decode, keeps_images):
                    number += 1
                    yield row
    except (pa.ArrowException, OSError, UnicodeDecodeError) as problem:
        after = f"after row {number}" if number else "as Parquet"
        raise DataError(
            f"{name} cannot be read {after}: {str(problem).splitlines()[0]}. Is the file complete?"
        ) from problem


def _decoder(schema: Any, name: str, keeps_images: bool) -> tuple[Decoder, list[str] | None]:
    """Returns (a decoder for batches of a schema, the columns to read; None: all columns). Columns of audio are not
    read, and columns of images only with `keeps_images`. Raises DataError if `datasets` cannot read the schema."""
    if b"huggingface" not in (schema.metadata or {}):
        return (lambda batch: batch.to_pylist()), None
    import pyarrow as pa
    from datasets import Dataset, DatasetInfo, Features

    try:
        features = Features(without_decoding(Features.from_arrow_schema(schema)))
    except Exception as problem:
        raise DataError(
            f"{name}: `datasets` cannot read the entry `huggingface` of its schema, which describes the columns "
            f"({first_line(problem)}). Write the file without the entry (pyarrow: "
            "table.replace_schema_metadata(None)), or with the installed version of `datasets`."
        ) from problem
    left_out = media_columns(features, keeps_images)
    kept = Features({name: feature for name, feature in features.items() if name not in left_out})

    def decode(batch: Any) -> Iterator[dict[str, Any]]:
        table = pa.Table.from_batches([batch.replace_schema_metadata(schema.metadata)])
        return iter(Dataset(table, info=DatasetInfo(features=kept)))

    return decode, list(kept) if left_out else None


def media_columns(features: Any, keeps_images: bool) -> list[str]:
    """The columns of images, audio and other media. With `keeps_images`, columns of images are not in the list."""
    from datasets import Image

    return [
        name
        for name, feature in features.items()
        if hasattr(feature, "decode") and not (keeps_images and isinstance(feature, Image))
    ]


def without_decoding(feature: Any) -> Any:
    """A copy of a feature of `datasets`, or of a dict of features, that decodes no image or audio at any depth. To
    decode an image, `datasets` opens the file or URL that the row names, and this may be any file of this machine."""
    if isinstance(feature, dict):
        return {name: without_decoding(inner) for name, inner in feature.items()}
    if isinstance(feature, (list, tuple)):
        return [without_decoding(inner) for inner in feature]
    if hasattr(feature, "decode"):
        return dataclasses.replace(feature, decode=False)
    if hasattr(feature, "feature"):
        return dataclasses.replace(feature, feature=without_decoding(feature.feature))
    return feature


def rows_at_once(keeps_images: bool) -> int:
    """The number of rows in memory at a time. A photograph in a row may have 10 MB."""
    return 16 if keeps_images else 256


def arrow_rows(table: Any, name: str, previous: int, decode: Decoder, keeps_images: bool = False) -> Iterator[Row]:
    """Yield the rows of a small Arrow table. `previous`: the number of rows before this table. Rows longer than
    longest_row() are not decoded. `keeps_images`: see checked_row().

    Arrow gives every struct all keys, with null for a missing value. Keys with null are removed. Only `content` stays
    in structs, because chat templates read it.
    """
    limit = longest_row(keeps_images)
    sizes = (
        [table.slice(at, 1).nbytes for at in range(len(table))]
        if table.nbytes > longest_row(keeps_images=False)
        else []
    )
    size, begin = max(1, table.nbytes // max(1, len(table))), 0
    for end in [*(at for at, size_of_row in enumerate(sizes) if size_of_row > limit), len(table)]:
        decoded = decode(table.slice(begin, end - begin)) if end > begin else ()
        for at, value in enumerate(decoded, previous + begin + 1):
            kept = {key: without_nulls(item, keep=("content",)) for key, item in value.items() if item is not None}
            own = sizes[at - previous - 1] if sizes else size
            if reason := length_fault(kept, own, keeps_images):
                yield bad_row(f"{name} row {at}", reason, None)
            else:
                yield Row(f"{name} row {at}", kept, size=size)
        if end < len(table):
            yield bad_row(f"{name} row {previous + end + 1}", too_long(sizes[end], keeps_images), None)
        begin = end + 1
