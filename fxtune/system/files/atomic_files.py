"""Files that are either complete or detected as incomplete: written with their sha256, synced, and renamed into place.

The bytes are hashed while they are written. `write_tensors` writes one tensor at a time, from any device, in the
safetensors format: eight bytes with the header's length, the header as JSON, then the bytes of each tensor
(github.com/huggingface/safetensors). The library's `save_file` needs all tensors in host memory at once and does not
expose the bytes.

Only regular files of the recorded size are read back. Links, named pipes and huge files are not opened."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

CHUNK = 8 * 2**20
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
class FileDigest:
    """The sha256 and the size of a file as it was written."""

    sha256: str
    bytes: int


@dataclass(frozen=True)
class Damage:
    """Why a file or a checkpoint is not usable."""

    reason: str
    lost: bool = False
    """Whether the saved bytes are gone. If not, another version of fxtune or a repaired disk may read them."""


class HashingWriter(contextlib.AbstractContextManager["HashingWriter"]):
    """A context manager that writes a new file. It sets `digest` at the end, after a sync if there was no error."""

    digest: FileDigest

    def __init__(self, path: Path) -> None:
        self._stream = path.open("xb")
        self._hash, self._bytes = hashlib.sha256(), 0

    def write(self, data: bytes | memoryview) -> None:
        self._stream.write(data)
        self._hash.update(data)
        self._bytes += len(data)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._stream:
            if kind is None:
                self._stream.flush()
                os.fsync(self._stream.fileno())
        self.digest = FileDigest(self._hash.hexdigest(), self._bytes)


@contextlib.contextmanager
def replacing(path: Path, shared: bool = False) -> Iterator[HashingWriter]:
    """A writer whose file replaces `path` when the body ends without an error. Raises OSError.

    The old file stays until the new one is on the disk. `shared`: whether other processes may replace the file at the
    same time.
    """
    staging = path.with_name(f".{path.name}.{os.getpid()}" if shared else f".{path.name}")
    staging.unlink(missing_ok=True)
    try:
        with HashingWriter(staging) as out:
            yield out
        os.replace(staging, path)
    except BaseException:
        with contextlib.suppress(OSError):
            staging.unlink(missing_ok=True)
        raise
    sync(path.parent)


def replace_text(path: Path, text: str, shared: bool = False) -> None:
    """Write a text file completely or not at all; see replacing(). Raises OSError."""
    with replacing(path, shared) as out:
        out.write(text.encode())


def replace_folder(staging: Path, final: Path, backup: Path) -> None:
    """Rename the complete folder `staging` to `final`. An old `final` is renamed to `backup` first and deleted last.

    Raises OSError. After a kill between the two renames only `backup` exists, and the caller must restore it.
    """
    replaced = final.is_dir() and not final.is_symlink()
    if replaced:
        final.rename(backup)
    elif final.is_symlink() or final.exists():
        final.unlink()
    os.replace(staging, final)
    sync(final.parent)
    if replaced:
        shutil.rmtree(backup, ignore_errors=True)


def write_text(path: Path, text: str) -> FileDigest:
    """Write a new file. Raises OSError."""
    with HashingWriter(path) as out:
        out.write(text.encode())
    return out.digest


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> FileDigest:
    """Write a new safetensors file, one tensor at a time. `metadata`: texts for its header. Raises OSError."""
    # Larger elements first, so that each tensor is aligned to its element size.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    end = 0
    for name in order:
        tensor = tensors[name]
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with HashingWriter(path) as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            if tensors[name].numel():
                on_host = tensors[name].detach().to("cpu").contiguous().reshape(-1)
                data = memoryview(on_host.view(torch.uint8).numpy().data)
                for begin in range(0, len(data), CHUNK):
                    out.write(data[begin : begin + CHUNK])
    return out.digest


def digest(path: Path) -> FileDigest:
    """The digest of a regular file. Raises OSError, and ValueError if `path` is no regular file."""
    size = _size(path)
    with path.open("rb") as stream:
        return FileDigest(hashlib.file_digest(stream, "sha256").hexdigest(), size)


def find_damage(path: Path, written: FileDigest) -> Damage | None:
    """The damage to a file since it was written with the digest `written`; None for an intact file."""
    try:
        size = _size(path)
        if size != written.bytes:
            return Damage(f"{path.name} has {size:,} bytes, and {written.bytes:,} were saved", lost=True)
        found = digest(path)
    except ValueError as error:
        return Damage(str(error))
    except OSError as error:
        reason = f"{path.name} cannot be read: {error.strerror or error}"
        return Damage(reason, lost=isinstance(error, FileNotFoundError))
    if found != written:
        return Damage(f"{path.name} is not the file that was saved (another sha256)", lost=True)
    return None


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a regular file. Raises ValueError with the reason if it cannot be read."""
    try:
        if (size := _size(path)) > JSON_LIMIT:
            raise ValueError(f"{path.name} has {size:,} bytes, far too many")
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


def _size(path: Path) -> int:
    """The bytes of a regular file. Raises OSError, and ValueError if `path` is no regular file."""
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path.name} is {'a link' if stat.S_ISLNK(status.st_mode) else 'no plain file'}")
    return status.st_size


def sync(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def json_or_empty(path: Path) -> dict[str, Any]:
    """The JSON object in a regular file; empty if the file does not exist or is damaged."""
    try:
        return read_json(path)
    except ValueError:
        return {}


def add_cached(path: Path, results: dict[str, Any]) -> None:
    """Add results to the JSON object in a file, under a lock. Errors of the disk are ignored: the file is a cache."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock")):
            replace_text(path, json.dumps({**json_or_empty(path), **results}, indent=1), shared=True)
