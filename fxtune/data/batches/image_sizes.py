"""Sizes of the images in documents, from the token tables. No image file is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fxtune.data.batches.segments import Spans
from fxtune.data.tokenized.table import TokenTable


class ImageSizes(NamedTuple):
    """int64 arrays with one entry an image."""

    features: np.ndarray
    """Tokens that the vision encoder's features replace. Marks around these tokens count as text."""
    heights: np.ndarray
    """Heights of whole images, in pixels."""
    widths: np.ndarray
    """Widths of whole images, in pixels."""
    document: np.ndarray
    """Index of the image's span."""

    def __len__(self) -> int:
        return len(self.features)


NO_IMAGES = ImageSizes(*(np.zeros(0, np.int64) for _ in ImageSizes._fields))


def image_sizes(tables: Sequence[TokenTable], found: Spans) -> ImageSizes:
    """The images of documents. An image in a shared prompt is computed once, so it counts once."""
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
