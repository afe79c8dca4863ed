"""Files that are whole or are known not to be: written front to back, hashed on the way, listed with their sha256 and size.

`Sealing` is a file that hashes what passes through it, so that nothing is read again to be summed, and that is on the disk when
it is closed. `write_tensors` puts tensors into it in the safetensors format (github.com/huggingface/safetensors: eight bytes
that say how long the header is, the header as JSON, the bytes of each tensor). The library's own `save_file` hands out nothing to
hash and wants all tensors in host memory at once; this takes one at a time, from wherever it is. Reading is the library's.

`broken` says why a folder is not what was written. It opens nothing but plain files of the size that was written: a link, a named
pipe or a file of a terabyte that somebody put in their place is refused by its looks.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

PIECE = 8 * 2**20
"""Bytes that are hashed and written at a time."""
JSON_LIMIT = 64 * 2**20
"""Bytes of the largest JSON file that is read."""

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""The names of dtypes in a safetensors file."""


@dataclass(frozen=True)
class Seal:
    """What a file was when it was written."""

    sha256: str
    bytes: int


class Sealing:
    """A new file for writing; a context. `seal` is set when it was left without an error, and the file is on the disk then."""

    seal: Seal

    def __init__(self, path: Path) -> None:
        self._stream = path.open("xb")
        self._sum, self._bytes = hashlib.sha256(), 0

    def write(self, data: bytes | memoryview) -> None:
        self._stream.write(data)
        self._sum.update(data)
        self._bytes += len(data)

    def __enter__(self) -> Sealing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._stream:
            if kind is None:
                self._stream.flush()
                os.fsync(self._stream.fileno())
        self.seal = Seal(self._sum.hexdigest(), self._bytes)


def write_text(path: Path, text: str) -> Seal:
    """Write a new file. Raises OSError."""
    with Sealing(path) as out:
        out.write(text.encode())
    return out.seal


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> Seal:
    """Write a new safetensors file, one tensor after the other from whatever device it is on. Raises OSError."""
    order = sorted(
        tensors, key=lambda name: (-tensors[name].element_size(), name)
    )  # so that each is aligned to its own size
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        tensor = tensors[name]
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with Sealing(path) as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            for piece in _pieces(tensors[name]):
                out.write(piece)
    return out.seal


def _pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    if tensor.numel():
        data = memoryview(tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data)
        for begin in range(0, len(data), PIECE):
            yield data[begin : begin + PIECE]


def broken(path: Path, seal: Seal) -> str | None:
    """Why the file at `path` is not the one that `seal` was made of, or None."""
    try:
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode):
            return f"{path.name} is {'a link' if stat.S_ISLNK(found.st_mode) else 'no plain file'}"
        return _changed(path, seal)
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror or error}"


def gone(path: Path, seal: Seal) -> bool:
    """Whether what `seal` was made of is known to be gone from `path`: that is less than broken(), as an error of a disk may pass
    and what is no plain file is somebody else's.
    """
    try:
        return stat.S_ISREG(path.lstat().st_mode) and _changed(path, seal) is not None
    except OSError as error:
        return isinstance(error, FileNotFoundError)


def _changed(path: Path, seal: Seal) -> str | None:
    """What is wrong with the bytes of a plain file, or None. Raises OSError."""
    size = path.lstat().st_size
    if size != seal.bytes:
        return f"{path.name} has {size:,} bytes, and {seal.bytes:,} were saved"
    if _sha256(path) != seal.sha256:
        return f"{path.name} is not the file that was saved (another sha256)"
    return None


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a plain file. Raises ValueError that says what is wrong with it."""
    try:
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode):
            raise ValueError(f"{path.name} is {'a link' if stat.S_ISLNK(found.st_mode) else 'no plain file'}")
        if found.st_size > JSON_LIMIT:
            raise ValueError(f"{path.name} has {found.st_size:,} bytes, far too many")
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path.name} cannot be read: {error.strerror or error}") from error
    except RecursionError as error:
        raise ValueError(f"{path.name} is nested too deeply") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path.name} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} holds no JSON object")
    return value


def replace_text(path: Path, text: str) -> None:
    """Write a file whole or not at all: what was there stays until the new one is on the disk. Raises OSError."""
    staging = path.with_name(f".{path.name}")
    staging.unlink(missing_ok=True)
    try:
        write_text(staging, text)
        os.replace(staging, path)
    except OSError:
        staging.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
