"""Positions of images in the tokens of a document, and cuts of documents outside images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fxtune.data.images.reference import ImageReference


class PlacedImage(NamedTuple):
    start: int
    """Index of the image's first token in the document."""
    tokens: int
    image: ImageReference

    @property
    def end(self) -> int:
        return self.start + self.tokens


def cut_before(images: Sequence[PlacedImage], at: int) -> int:
    """The last place for a cut up to `at`: `at` itself, or the start of the image that a cut at `at` would divide."""
    return next((image.start for image in images if image.start < at < image.end), at)


def without(images: Sequence[PlacedImage], start: int, stop: int) -> tuple[PlacedImage, ...]:
    """The images of a document after its tokens from `start` to `stop` were removed, at their new positions."""
    return tuple(
        image._replace(start=image.start - (stop - start) * (image.start >= stop))
        for image in images
        if image.end <= start or image.start >= stop
    )
