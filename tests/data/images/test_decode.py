"""Real small files of every kind that a dataset may hold."""

from __future__ import annotations

import struct
import zlib
from io import BytesIO

import numpy as np
import pytest
from PIL import Image, ImageOps

from fxtune.data.formats.values import RowError
from fxtune.data.images import decode as images
from fxtune.data.images.decode import decode, measure

SIZE = 32, 16
"""Width and height."""


def file(image: Image.Image, format: str = "PNG", **options) -> bytes:
    out = BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


def corner(color: str = "red") -> Image.Image:
    """Black, with a coloured upper left quarter, so that each turn looks different."""
    image = Image.new("RGB", SIZE)
    image.paste(color, (0, 0, SIZE[0] // 2, SIZE[1] // 2))
    return image


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["JPEG", "PNG", "TIFF", "WEBP"])
def test_exif_orientation_turns_the_image(orientation, format):
    exif = Image.Exif()
    exif[0x0112] = orientation
    upright = corner()
    # The pixels as a camera that was turned stores them: the inverse of what the orientation asks for.
    inverse = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}
    stored = upright if orientation == 1 else upright.transpose(inverse[orientation])
    data = file(stored, format, exif=exif, **({"quality": 95} if format in ("JPEG", "WEBP") else {}))
    assert measure(data) == (SIZE[1], SIZE[0])
    found = decode(data)
    assert found.size == SIZE
    assert found.mode == "RGB"
    difference = np.asarray(found, int) - np.asarray(upright, int)
    assert np.abs(difference).mean() < 20  # lossy formats blur the edges; a wrong turn differs by 40 and more
    assert found.getpixel((2, 2))[0] > 200
    assert found.getpixel((SIZE[0] - 3, SIZE[1] - 3))[0] < 60


@pytest.mark.parametrize(("format", "mode"), [("PNG", "RGBA"), ("PNG", "LA"), ("PNG", "P"), ("WEBP", "RGBA")])
def test_transparent_parts_are_white(format, mode):
    image = Image.new("RGBA", SIZE, (0, 0, 0, 0))
    image.paste((0, 0, 0, 255), (0, 0, 16, 16))
    image = image.quantize(4) if mode == "P" else image.convert(mode)
    found = decode(file(image, format, **({"lossless": True} if format == "WEBP" else {})))
    assert found.getpixel((2, 2)) == (0, 0, 0)
    assert found.getpixel((30, 2)) == (255, 255, 255)


def test_a_transparent_colour_is_white():
    image = Image.new("RGB", SIZE, (10, 20, 30))
    image.paste((1, 2, 3), (0, 0, 16, 16))
    found = decode(file(image, "PNG", transparency=(1, 2, 3)))
    assert found.getpixel((2, 2)) == (255, 255, 255)
    assert found.getpixel((30, 2)) == (10, 20, 30)


@pytest.mark.parametrize("format", ["PNG", "TIFF", "PPM"])
def test_grey_values_of_16_bits_are_scaled(format):
    values = np.linspace(0, 65535, SIZE[0] * SIZE[1]).astype(np.uint16).reshape(SIZE[1], SIZE[0])
    found = np.asarray(decode(file(Image.fromarray(values), format)))
    assert np.abs(found[..., 0].astype(int) - (values >> 8)).max() <= 1
    assert (found[..., 0] == found[..., 2]).all()


def test_colours_of_16_bits_are_scaled():
    row = b"\0" + b"".join(struct.pack(">HHH", 0x8000, 0x4000, 0xFFFF) for _ in range(4))
    found = decode(png(4, 1, row, depth=16, kind=2))
    assert found.getpixel((0, 0)) in ((128, 64, 255), (127, 64, 255))


def test_palettes_and_printing_colours_become_rgb():
    assert decode(file(corner("lime").quantize(4), "GIF")).getpixel((2, 2)) == (0, 255, 0)
    red, green, blue = decode(file(corner().convert("CMYK"), "JPEG", quality=95)).getpixel((2, 2))
    assert red > 200
    assert max(green, blue) < 60
    assert decode(file(corner("white").convert("1"), "PNG")).getpixel((2, 2)) == (255, 255, 255)


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG"])
def test_the_first_frame_of_an_animation_is_used(format):
    frames = [Image.new("RGB", SIZE, color) for color in ("red", "lime", "blue")]
    data = file(frames[0], format, save_all=True, append_images=frames[1:], duration=50)
    with Image.open(BytesIO(data)) as image:
        assert image.n_frames == 3
    assert measure(data) == (16, 32)
    red, green, blue = decode(data).getpixel((5, 5))
    assert red > 240
    assert max(green, blue) < 15


@pytest.mark.parametrize("format", ["JPEG", "PNG", "GIF", "WEBP", "TIFF", "BMP"])
def test_a_truncated_file_is_an_error(format):
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8))
    data = file(noise, format)
    measure(data)
    for share in (0.5, 0.9):
        for read in (measure, decode):
            with pytest.raises(RowError):
                read(data[: int(len(data) * share)])


@pytest.mark.parametrize("data", [b"", b"no image", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"])
def test_what_is_no_image_is_an_error(data):
    for read in (measure, decode):
        with pytest.raises(RowError, match="formats JPEG"):
            read(data)


def png(width: int, height: int, rows: bytes, depth: int = 8, kind: int = 0) -> bytes:
    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 0)
    packed = zlib.compress(rows, 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")


@pytest.mark.parametrize(("width", "height"), [(20_000, 20_000), (65_000, 65_000)])
def test_a_decompression_bomb_is_refused_before_it_is_decoded(width, height):
    data = png(width, height, bytes(1000))  # small and broken: decoding it would raise another error
    for read in (measure, decode):
        with pytest.raises(RowError, match="pixels"):
            read(data)


def test_the_limit_is_below_the_limit_of_pillow_that_raises():
    assert Image.MAX_IMAGE_PIXELS < images.MAX_PIXELS < 2 * Image.MAX_IMAGE_PIXELS


def test_floating_point_pixels_are_refused():
    data = file(Image.fromarray(np.zeros((4, 4), np.float32)), "TIFF")
    with pytest.raises(RowError, match="floating-point"):
        decode(data)


def test_a_jpeg_is_measured_and_decoded_alike():
    image = ImageOps.expand(corner(), 3, "white").resize((301, 77))
    data = file(image, "JPEG", quality=90)
    assert measure(data) == (77, 301)
    assert decode(data).size == (301, 77)
