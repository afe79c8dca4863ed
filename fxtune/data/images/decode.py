"""Decodes the bytes of an image file to an upright RGB image.

The picture is rotated by its EXIF orientation. Transparent parts become white. Grey values of 16 bits are scaled to 8.
The first frame of an animation is used. Colour profiles are not applied, as in transformers.

The bytes come from strangers. Only FORMATS are opened, because some of Pillow's readers start other programs, such as
Ghostscript for EPS. An image with more than MAX_PIXELS is refused before its pixels are decompressed.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from io import BytesIO
from typing import TYPE_CHECKING

import numpy as np

from fxtune.data.formats.values import RowError
from fxtune.errors import first_line

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "PPM", "AVIF")
MAX_PIXELS = 1 << 27
"""134 million pixels, which take 400 MB as RGB. A phone's camera of 108 million pixels is below this limit."""
SIDE = 256
"""The longer side of a thumbnail has at most this many pixels."""
_HEIC = re.compile(rb"....ftyp(hei|hev|mif1|msf1)", re.DOTALL)
"""The beginning of HEIC files, which phones write. AVIF files have a similar one."""
_ORIENTATION = 0x0112
"""The EXIF tag of the rotation. The values 5 to 8 exchange height and width."""


def measure(data: bytes) -> tuple[int, int]:
    """(height, width) of the upright image. Decodes the whole file, a JPEG at an eighth of its size, so that a broken
    file is found before training. Raises RowError."""
    with _opened(data) as image:
        width, height = image.size
        image.draft("L", (1, 1))
        image.load()
        # Read after load(), in which Pillow rotates a TIFF and removes the tag. `size` is of the rotated TIFF already.
        turned = image.getexif().get(_ORIENTATION, 1) in (5, 6, 7, 8)
    return (width, height) if turned else (height, width)


def decode(data: bytes) -> Image:
    """The upright RGB image. Raises RowError."""
    from PIL import ImageOps

    with _opened(data) as image:
        image.load()
        ImageOps.exif_transpose(image, in_place=True)  # a copy would take as much time as the processor
        return _as_rgb(image)


def thumbnail(data: bytes) -> bytes:
    """A small JPEG of the upright image for HTML pages: about 15 KB, at most 100 KB. Raises RowError."""
    image, out = decode(data), BytesIO()
    image.thumbnail((SIDE, SIDE))
    image.save(out, "JPEG", quality=85, subsampling=0)
    return out.getvalue()


@contextmanager
def _opened(data: bytes) -> Iterator[Image]:
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # damaged metadata, and sizes that Pillow finds large
            with Image.open(BytesIO(data), formats=_formats()) as image:
                width, height = image.size
                if width * height > MAX_PIXELS:
                    raise RowError(f"it has {width:,} x {height:,} pixels; the limit is {MAX_PIXELS:,} in all")
                yield image
    except (RowError, MemoryError):
        raise
    except Image.DecompressionBombError:
        raise RowError(f"it has more than {MAX_PIXELS:,} pixels") from None
    except Image.UnidentifiedImageError:
        heic = "a HEIC image; convert it to JPEG. It is " if _HEIC.match(data) else ""
        raise RowError(f"it is {heic}no image of the formats {', '.join(FORMATS)}") from None
    except Exception as error:  # noqa: BLE001 - Pillow's readers raise anything on broken bytes
        raise RowError(f"it cannot be decoded ({first_line(error)})") from None


@cache
def _formats() -> list[str]:
    """The FORMATS that the installed Pillow reads; some builds have no AVIF."""
    from PIL import Image

    Image.init()
    return [name for name in FORMATS if name in Image.OPEN]


def _as_rgb(image: Image) -> Image:
    from PIL import Image

    if image.mode in ("I", "I;16", "I;16L", "I;16B", "I;16N"):
        # Pillow's own conversion clips values above 255.
        grey = np.asarray(image).astype(np.int64).clip(0, 0xFFFF) >> 8
        return Image.fromarray(grey.astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise RowError("its pixels are floating-point numbers, whose range is not known; store 8 or 16 bits")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")
