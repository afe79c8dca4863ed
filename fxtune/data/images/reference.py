"""Finds an image of a row: a file beside the data file, or bytes in the row.

A dataset is data from a stranger. It may name only files inside the folder of its data file, also after links are
resolved. Otherwise it could bring the user's private files into training or a preview. Images on the web are not
fetched: a run would depend on servers, and a dataset could make the machine request any address.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

from fxtune.data.formats.values import RowError, type_name
from fxtune.data.images.decode import measure
from fxtune.errors import FILE, kind_of, shortened

MAX_BYTES = 128 << 20
"""A file with more bytes is refused."""
EMBEDDED = "an image in the row"
"""The name of an image without a path, for messages."""
_BASE64 = re.compile(r"[A-Za-z0-9+/\s]{100,}={0,2}\s*$")
"""Base64 without a `data:` before it. A path without a dot is assumed to be shorter."""
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")


@dataclass(frozen=True)
class ImageReference:
    """An image's place and size. Either `path` or `data` is set."""

    name: str
    """The path as the row has it, for messages."""
    height: int
    """Pixels, after the image was turned upright."""
    width: int
    digest: int
    """Hash of the file's bytes, 64 bits."""
    path: str = ""
    """The absolute path of the file, after links were resolved."""
    stamp: tuple[int, int] = (0, 0)
    """Size of the file in bytes and its modification time in nanoseconds."""
    data: bytes = b""

    @property
    def size(self) -> tuple[int, int]:
        """(height, width)"""
        return self.height, self.width

    def read(self) -> bytes:
        """The bytes of the image. Raises RowError if the file was changed since it was measured."""
        if not self.path:
            return self.data
        data, stamp = read_file(self.path)
        if stamp != self.stamp:
            raise RowError("it changed since the data was tokenized")
        return data


def find_image(value: Any, folder: Path | None) -> ImageReference:
    """The image that a row names by `value`: a path, a data: URI, base64, bytes, or an object of `datasets` with
    `bytes` or `path`.

    `folder`: the folder of the data file. Relative paths begin in this folder, and no path may lead out of it. None:
    the rows have no folder. Raises RowError; the message begins with the image's name.
    """
    name, data = _name_and_data(value)
    try:
        path, stamp = "", (0, 0)
        if data is None:
            path = _path_inside(name.removeprefix("file://"), folder)
            data, stamp = read_file(path)
        elif len(data) > MAX_BYTES:
            raise RowError(_too_large(len(data)))
        height, width = measure(data)
    except RowError as reason:
        raise RowError(f"{_shown(name)}: {reason}") from None
    digest = int.from_bytes(blake2b(data, digest_size=8).digest(), "little")
    return ImageReference(_shown(name), height, width, digest, path, stamp, b"" if path else data)


def read_file(path: str) -> tuple[bytes, tuple[int, int]]:
    """(the bytes of a file, its size and modification time). Raises RowError."""
    found = kind_of(path)
    if found != FILE:
        raise RowError("there is no such file" if found is None else f"it is {found}, not a file")
    try:
        with open(path, "rb") as file:
            stat = os.fstat(file.fileno())
            if stat.st_size > MAX_BYTES:
                raise RowError(_too_large(stat.st_size))
            return file.read(MAX_BYTES), (stat.st_size, stat.st_mtime_ns)
    except OSError as problem:
        raise RowError(f"it cannot be read: {problem.strerror or problem}") from None


def _name_and_data(value: Any) -> tuple[str, bytes | None]:
    """(the name of an image, its bytes if the row has them)."""
    if isinstance(value, Mapping):
        data, path = value.get("bytes"), value.get("path")
        if isinstance(data, (bytes, bytearray, memoryview)):
            return path if isinstance(path, str) and path else EMBEDDED, bytes(data)
        if data is not None:
            raise RowError(f"{EMBEDDED}: `bytes` is {type_name(data)}, not bytes")
        value = path
    if isinstance(value, (bytes, bytearray, memoryview)):
        return EMBEDDED, bytes(value)
    if not isinstance(value, str) or not value:
        raise RowError(
            f"an image is {'empty' if value == '' else type_name(value)}: give a path, a data: URI or bytes"
        )
    if not value.startswith("data:"):
        if not _BASE64.match(value):
            return value, None
        value = f"data:;base64,{value}"
    head, _, body = value.partition(",")
    try:
        if head.endswith(";base64"):
            return EMBEDDED, base64.b64decode("".join(body.split()), validate=True)  # base64 of MIME has line breaks
        return EMBEDDED, unquote_to_bytes(body)
    except (binascii.Error, ValueError) as problem:
        raise RowError(f"{EMBEDDED}: its data: URI is no base64 ({problem})") from None


def _path_inside(name: str, folder: Path | None) -> str:
    """The absolute path of a file, after links were resolved. Raises RowError if it is not in `folder`."""
    if scheme := _SCHEME.match(name):
        raise RowError(
            f"{scheme[1]} addresses are not fetched while training. Download the image next to the data file, and "
            "name the file"
        )
    if folder is None:
        raise RowError("rows of the hub have no folder for files; their images are bytes")
    try:
        root, path = os.path.realpath(folder), os.path.realpath(os.path.join(folder, name))
    except (OSError, ValueError) as problem:
        raise RowError(f"no file has such a name ({problem})") from None
    if os.path.commonpath([root, path]) != root:
        raise RowError(
            f"the path leads out of {folder}, the folder of the data file (links followed). Move the image into it"
        )
    return path


def _too_large(size: int) -> str:
    return f"it has {size / 2**20:,.0f} MiB; the limit is {MAX_BYTES >> 20} MiB"


def _shown(name: str) -> str:
    return name if name == EMBEDDED else shortened(name)
