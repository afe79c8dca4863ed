"""Small copies of images."""

from __future__ import annotations

import random
from io import BytesIO

import pytest
from PIL import Image

from fxtune.data.images.decode import SIDE, thumbnail
from fxtune.data.images.reference import find_image
from fxtune.reports.run_files import LARGEST_PICTURE


@pytest.mark.parametrize(
    ("size", "shown"), [((330, 330), (SIDE, SIDE)), ((800, 400), (SIDE, SIDE // 2)), ((20, 30), (20, 30))]
)
def test_the_copy_is_the_whole_image_and_small(tmp_path, size, shown):
    noise = random.Random(0).randbytes(3 * size[0] * size[1])  # no image makes a larger JPEG
    Image.frombytes("RGB", size, noise).save(tmp_path / "a.png")
    copy = thumbnail(find_image("a.png", tmp_path).read())
    image = Image.open(BytesIO(copy))
    assert (image.format, image.size) == ("JPEG", shown)
    assert len(copy) < LARGEST_PICTURE


def test_colours_of_small_images_stay(tmp_path):
    """Half the columns are red and half are blue: colours are not averaged over pixels."""
    image = Image.new("RGB", (16, 16), "red")
    image.paste("blue", (8, 0, 16, 16))
    image.save(tmp_path / "a.png")
    copy = Image.open(BytesIO(thumbnail(find_image("a.png", tmp_path).read())))
    for column, colour in ((7, (255, 0, 0)), (8, (0, 0, 255))):
        assert max(abs(seen - wanted) for seen, wanted in zip(copy.getpixel((column, 5)), colour, strict=True)) < 40
