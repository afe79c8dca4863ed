"""The images of documents: their sizes, from the token tables, and their tensors for a micro-batch.

The loader's workers decode and resize images when they build a batch. The tensors are not kept, because they are many
times larger than the file. Each use reads the file again. With stored features (data.image_features) the workers copy
features instead, in one dimension and under the name `pixel_values`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from fxtune.data.batches.segments import Spans
from fxtune.data.formats.values import RowError
from fxtune.data.images.processor import ImageProcessor, Tensors
from fxtune.data.tokenized.table import TokenTable
from fxtune.errors import ConfigError, DataError

PROBED = 8
"""The size of all image tensors of a micro-batch is estimated from about this many images."""


class LostImageError(DataError):
    """An image that was read when the data was tokenized cannot be read now."""

    def __init__(self, what: str, table: TokenTable | None = None, image: int = 0) -> None:
        """`image`: the number in `table` of the first image of the document."""
        super().__init__(what)
        self.table, self.image = table, image
        self.place = table.name if table is not None else ""
        """The place of the row, for the message."""

    def __str__(self) -> str:
        return f"{self.place}: {super().__str__()}"


def image_bytes(tables: Sequence[TokenTable], source: np.ndarray, start: np.ndarray, length: np.ndarray) -> int:
    """An estimate of the bytes of documents' image tensors. `source`, `start`, `length`: see BatchSpec."""
    processor = next((table.image_processor for table in tables if table.images is not None), None)
    parts = zip(source.tolist(), start.tolist(), length.tolist(), strict=True)
    of_table = [(tables[at], tables[at].images_in(first, count)) for at, first, count in parts]
    indices = list(chain.from_iterable([(table, index) for index in found] for table, found in of_table))
    if processor is None or not indices:
        return 0
    if (features := indices[0][0].features) is not None:  # then all tables with images have some
        return features.itemsize * sum(int(table.image_sizes(np.array([index]))[0][0]) for table, index in indices)
    probed = indices[:: -(-len(indices) // PROBED)]
    try:
        tensors = processor.merge([processor.blank_tensors([table.image(index).size]) for table, index in probed])
    except RowError:  # the step with this image will raise the error
        return 0
    return sum(tensor.nbytes for tensor in tensors.values()) * len(indices) // len(probed)


class BatchImages:
    """Makes the image tensors of documents. `pieces`: as in BatchSpec."""

    def __init__(self, tables: Sequence[TokenTable], pieces: int) -> None:
        processors = [table.image_processor for table in tables if table.images is not None]
        self.processor: ImageProcessor | None = processors[0] if processors else None
        if self.processor is not None and pieces > 1:
            raise ConfigError("parallel.context: rows with images cannot be divided. Set it to 1.")
        self._of_documents: list[Tensors] = []
        self._last: Tensors | None = None

    def add(self, table: TokenTable, start: int, length: int) -> None:
        """Read the images among the tokens `start` to `start + length` of a table. Raises DataError."""
        self._last = self._read(table, table.images_in(start, length)) if self.processor is not None else None
        if self._last is not None:
            self._of_documents.append(self._last)

    def rope_positions(self, table: TokenTable, start: int, length: int, shared: int) -> np.ndarray | None:
        """int64 [3, length]: the positions of the document that was added last; None if they equal its position_ids.
        `shared`: as in BatchSpec."""
        if self.processor is None or self.processor.rope_positions is None:
            return None
        images, indices = self._last, table.images_in(start - shared, length + shared)
        if table.features is not None and indices:
            sizes = [table.image(index).size for index in indices]
            images = self.processor.merge([self.processor.without_pixels(*size) for size in sizes])
        elif shared:
            images = self._read(table, indices)
        if images is None:
            return None
        ids = torch.from_numpy(np.asarray(table.ids[start - shared : start + length], np.int64))
        return self.processor.rope_positions(ids, images)[:, shared:].numpy()

    def tensors(self) -> Tensors | None:
        """Arguments of the model's forward; None if no document has an image."""
        if self.processor is None or not self._of_documents:
            return None
        if self._of_documents[0]["pixel_values"].dim() == 1:
            return {"pixel_values": torch.cat([own["pixel_values"] for own in self._of_documents])}
        return self.processor.merge(self._of_documents)

    def _read(self, table: TokenTable, indices: range) -> Tensors | None:
        if not indices:
            return None
        if table.features is not None:
            found = table.features_of(indices)
            (dtype,) = found.dtype.names or ()
            return {"pixel_values": torch.from_numpy(found[dtype].reshape(-1)).view(getattr(torch, dtype))}
        assert self.processor is not None
        try:
            return self.processor.read([table.image(index) for index in indices])
        except RowError as reason:
            raise LostImageError(
                f"{reason}. It was read when the data was tokenized. Restore the file and start the run again, which "
                "resumes it.",
                table,
                indices.start,
            ) from None


class ImageSizes(NamedTuple):
    """int64 arrays with one entry an image. Heights and widths are of whole images, in pixels."""

    features: np.ndarray
    """Tokens that the vision encoder's features replace. Marks around these tokens count as text."""
    heights: np.ndarray
    widths: np.ndarray
    document: np.ndarray
    """Index of the image's document among the spans."""

    def __len__(self) -> int:
        return len(self.features)


NO_IMAGES = ImageSizes(*(np.zeros(0, np.int64) for _ in ImageSizes._fields))


def image_sizes(tables: Sequence[TokenTable], found: Spans) -> ImageSizes:
    """The sizes of documents' images. An image in a shared prompt is computed once, so it counts once."""
    parts = []
    for number, table in enumerate(tables):
        if table.images is None:
            continue
        own = np.flatnonzero(found.source == number)
        start = found.start[own]
        first, end = (np.searchsorted(table.image_starts, at) for at in (start, start + found.length[own]))
        counts = end - first
        indices = np.repeat(end - counts.cumsum(), counts) + np.arange(counts.sum())
        parts.append((*table.image_sizes(indices), np.repeat(own, counts)))
    return ImageSizes(*(np.concatenate(columns) for columns in zip(*parts, strict=True))) if parts else NO_IMAGES
