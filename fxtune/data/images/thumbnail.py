"""Small copies of images, for pages that people read."""

from __future__ import annotations

from io import BytesIO

from fxtune.data.images.decode import decode
from fxtune.data.images.reference import ImageReference

SIDE = 256
"""Pixels of the longer side, at most."""


def thumbnail(reference: ImageReference) -> bytes:
    """A JPEG of the whole upright image: about 15 KB, at most 100 KB. Raises RowError if the image has changed."""
    image, out = decode(reference.read()), BytesIO()
    image.thumbnail((SIDE, SIDE))
    image.save(out, "JPEG", quality=85, subsampling=0)
    return out.getvalue()
