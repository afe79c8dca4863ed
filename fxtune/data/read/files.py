"""From what a user wrote to the files it means: a file, a folder, a glob or `builtin:NAME`, of one kind.

Whatever is missing, empty, mixed or unknown is said here, with the nearest name that exists, before a row is read.
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

from fxtune import errors
from fxtune.data.read.formats import recognise
from fxtune.data.read.jsonl import lines
from fxtune.errors import FILE, DataError, kind_of

BUILTIN = "builtin:"
KINDS = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".jsonl.gz": "jsonl", ".ndjson.gz": "jsonl",
    ".json": "json", ".parquet": "parquet", ".csv": "csv", ".tsv": "csv", ".txt": "text", ".md": "text",
}  # fmt: skip
"""The kind of file that an ending means."""
HASH_BLOCK = 16 << 20
"""Bytes hashed at a time. Part of what a content hash is: another value makes other hashes."""
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_COMPANIONS = ("readme", "license", "licence", "notice", "changelog", "citation", "dataset_infos", "dataset_info")


@dataclass(frozen=True)
class DataFile:
    path: Path
    name: str
    """For messages: as the user wrote it, or as found below what the user wrote."""
    kind: str
    """jsonl, json, parquet, csv, text; arrow for what `datasets` made."""
    end: int
    """Bytes of it that are used, from the first on."""
    stamp: tuple[int, int]
    """Size and time of change when it was found."""

    @property
    def packed(self) -> bool:
        return self.path.suffix.lower() == ".gz"

    def require_unchanged(self) -> None:
        """Raise DataError where the file was written to since it was found: its rows may be half old, half new."""
        if _stamp(self.path) != self.stamp:
            raise DataError(f"{self.name} changed while it was read. Start again once nothing writes to it.")

    def digest(self) -> str:
        """Hash of the used bytes, in blocks that the cores share (hashlib lets go of the interpreter)."""

        def block(start: int) -> bytes:
            with _opened(self.path) as opened:
                opened.seek(start)
                return blake2b(opened.read(min(HASH_BLOCK, self.end - start)), digest_size=16).digest()

        if self.end <= HASH_BLOCK:  # a folder may hold a hundred thousand of these
            return blake2b(block(0), digest_size=16).hexdigest()
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            blocks = pool.map(block, range(0, self.end, HASH_BLOCK))
            return blake2b(b"".join(blocks), digest_size=16).hexdigest()


def at(path: Path, kind: str, name: str | None = None) -> DataFile:
    """A file that is known to be there."""
    stamp = _stamp(path)
    return DataFile(path, name or str(path), kind, stamp[0], stamp)


def find(written: str) -> list[Path] | None:
    """The files that `written` means, sorted; None where it may be a hub id. Raises DataError where there are none."""
    path = expanded(written)
    if written.startswith(BUILTIN):
        return [_builtin(written)]
    if os.path.isdir(path):  # os.path and not Path: a name that is too long, or of odd characters, is just not there
        return _walk(path)
    if os.path.exists(path):
        return [path]
    if glob.has_magic(written):
        found = sorted(match for match in map(Path, glob.glob(str(path), recursive=True)) if os.path.isfile(match))
        if not found:
            raise DataError(f"{written}: the glob matches no file (looked from {Path.cwd()}).{_nearest_path(path)}")
        return found
    if os.path.islink(path):
        raise DataError(
            f"{written} is a link that leads nowhere, to {os.readlink(path)}. Correct it, or name the file."
        )
    if _looks_local(written, path):
        raise DataError(
            f"{written}: there is no such file or folder (looked for {path.absolute()}).{_nearest_path(path)}"
        )
    return None


def sort_out(written: str, found: list[Path], limit: int | None) -> list[DataFile]:
    """The data files among `found`, all of one kind; no more of them, and of JSONL no more bytes, than `limit` rows need."""
    kinds: dict[str, list[Path]] = {}
    for path in found:
        if path.name.lower().endswith(tuple(KINDS)):
            require_file(path)
        if kind := _kind(path):
            kinds.setdefault(kind, []).append(path)
    if not kinds:
        endings = ", ".join(sorted({path.suffix or path.name for path in found}))
        raise DataError(
            f"{written}: no file that fxtune reads (found {endings}). It reads {' '.join(KINDS)}; unpack or convert "
            "others, and add an ending that is missing."
        )
    if len(kinds) > 1:  # a dataset's card and licence are not its rows
        own = {
            kind: [path for path in paths if path.name.lower().split(".")[0] not in _COMPANIONS]
            for kind, paths in kinds.items()
        }
        kinds = {kind: paths for kind, paths in own.items() if paths} or kinds
    if len(kinds) > 1:
        mixed = "; ".join(
            f"{kind}: {paths[0].name}" + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")
            for kind, paths in kinds.items()
        )
        raise DataError(
            f"{written} holds files of several kinds ({mixed}). Make each kind a source of its own, with a glob "
            f"such as {Path(written.split('*')[0]) / '**' / '*.jsonl'}."
        )
    ((kind, paths),) = kinds.items()
    files: list[DataFile] = []
    left = limit
    for path in paths:
        file = at(path, kind, written if written.startswith(BUILTIN) else None)
        if file.end == 0:
            raise DataError(f"{path} is empty. Remove it, or write it again.")
        if left is not None and kind == "jsonl" and not file.packed:
            end, count = _end_of_rows(path, left)
            file, left = replace(file, end=end), left - count
        files.append(file)
        if left == 0:
            break
    return files


def require_file(path: Path) -> None:
    """Raise DataError where `path` is there and is no file."""
    if (found := kind_of(path)) not in (None, FILE):
        raise DataError(f"{path} is {found}, not a file. Write what it holds to a file and name that.")


def nearest(name: str, names: Iterable[str]) -> str:
    close = errors.nearest(name, names)
    return f"; did you mean {close!r}?" if close else ""


def _builtin(name: str) -> Path:
    folder = Path(__file__).parents[2] / "assets" / "data"
    path = folder / (name.removeprefix(BUILTIN) + ".jsonl")
    if not path.is_file():
        there = [BUILTIN + other.stem for other in sorted(folder.glob("*.jsonl"))]
        raise DataError(f"{name} does not ship with fxtune. What does: {', '.join(there) or 'nothing'}.")
    return path


def expanded(written: str) -> Path:
    """The path that `written` means, with the home folder for `~`."""
    return Path(
        os.path.expanduser(written)
    )  # unlike Path.expanduser, it leaves ~somebody who has no home here as it is


def _walk(folder: Path) -> list[Path]:
    """Files below a folder, sorted; hidden ones are left out, linked folders are entered once."""
    found, entered = [], set()
    for parent, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(parent)
        folders[:] = [] if real in entered else sorted(name for name in folders if not name.startswith("."))
        found += [] if real in entered else [Path(parent, name) for name in names if not name.startswith(".")]
        entered.add(real)
    if not found:
        raise DataError(f"{folder} is an empty folder. Put data files in it, or correct the path.")
    return sorted(found)


def _kind(path: Path) -> str | None:
    name = path.name.lower()
    kind = next((kind for ending, kind in KINDS.items() if name.endswith(ending)), None)
    return "jsonl" if kind == "json" and _one_row_a_line(path) else kind


def _one_row_a_line(path: Path) -> bool:
    """Whether a .json file is JSONL under a wrong name: its first line is a whole object, and more follows or it is a row."""
    with _opened(path) as file:
        line, _, rest = file.read(1 << 20).removeprefix(b"\xef\xbb\xbf").lstrip().partition(b"\n")
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return False
    if not isinstance(value, dict):
        return False
    return bool(rest.strip()) or recognise(value) is not None


def _end_of_rows(path: Path, count: int) -> tuple[int, int]:
    """(bytes that the first `count` rows of a JSONL file take, rows there are in them)."""
    end = seen = 0
    with _opened(path) as file:
        for line, length in lines(file, b"\n"):
            end += length
            seen += bool(line.strip())
            if seen == count:
                break
    return end, seen


def _opened(path: Path) -> BinaryIO:
    try:
        return open(path, "rb")
    except OSError as problem:
        raise DataError(f"{path} cannot be opened: {problem.strerror}.") from problem


def _stamp(path: Path) -> tuple[int, int]:
    try:
        stat = path.stat()
    except OSError as problem:
        raise DataError(f"{path} cannot be read: {problem.strerror}.") from problem
    return stat.st_size, stat.st_mtime_ns


def _looks_local(written: str, path: Path) -> bool:
    """Whether somebody who writes this means a file or folder, so that the hub must not be asked for it."""
    name = path.name.lower()
    return (
        _HUB_ID.fullmatch(written) is None
        or name.endswith(tuple(KINDS))
        or name.endswith((".gz", ".zst", ".zip", ".arrow"))
        or (len(path.parts) > 1 and os.path.isdir(path.parts[0]))
    )


def _nearest_path(path: Path) -> str:
    """The nearest name beside the first part of a path that does not exist."""
    path = path.absolute()
    while not os.path.isdir(path.parent):
        path = path.parent
    names = sorted(os.listdir(path.parent))
    close = errors.nearest(path.name, names)
    close = close or next((name for name in names if errors.nearest(path.stem, [name.split(".")[0]])), None)
    if close:
        return f" Did you mean {path.parent / close}?"
    return f" In {path.parent} there is {', '.join(names[:8]) or 'nothing'}{' ...' if len(names) > 8 else ''}."
