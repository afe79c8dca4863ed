"""Finds the data files that a path names. The path is a file, a folder, a glob or `builtin:NAME`.

This module raises the errors about missing, empty, unknown or mixed files, before a row is read. If a file is missing,
the error suggests the closest name that exists.
"""

from __future__ import annotations

import glob
import json
import os
import re
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

from fxtune.data.formats.registry import row_format
from fxtune.data.formats.values import NOT_UTF8
from fxtune.data.read.row import bounded_lines
from fxtune.errors import FILE, DataError, kind_of, nearest

BUILTIN = "builtin:"
KINDS = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".jsonl.gz": "jsonl", ".ndjson.gz": "jsonl",
    ".json": "json", ".parquet": "parquet", ".csv": "csv", ".tsv": "csv", ".txt": "text", ".md": "text",
}  # fmt: skip
"""The kind of a file by its suffix."""
PACKED = (".gz", ".zst", ".xz", ".bz2", ".zip", ".tar", ".arrow")
"""Suffixes of files that may hold rows. fxtune reads such a file only if its whole suffix is in KINDS (.jsonl.gz)."""
HASH_BLOCK = 16 << 20
"""Bytes hashed at a time. Another value gives other content hashes."""
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_COMPANIONS = ("readme", "license", "licence", "notice", "changelog", "citation", "dataset_infos", "dataset_info")


@dataclass(frozen=True)
class DataFile:
    path: Path
    name: str
    """The name in messages: the path of the file, or `builtin:NAME`."""
    kind: str
    """jsonl, json, parquet, csv or text; arrow for a file that `datasets` made."""
    size: int
    """Bytes to read, from the start of the file."""
    stamp: tuple[int, int]
    """Size in bytes and modification time in nanoseconds, when the file was found."""

    @property
    def compressed(self) -> bool:
        return self.path.suffix.lower() == ".gz"

    def require_unchanged(self) -> None:
        """Raise DataError if the file was written to since it was found."""
        if _stamp(self.path) != self.stamp:
            raise DataError(f"{self.name} changed while it was read. Start again when nothing writes to it.")

    def digest(self) -> str:
        """A hash of the first `size` bytes, computed in blocks on several cores."""

        def block(start: int) -> bytes:
            with _open(self.path) as file:
                file.seek(start)
                return blake2b(file.read(min(HASH_BLOCK, self.size - start)), digest_size=16).digest()

        if self.size <= HASH_BLOCK:  # without threads: a folder may hold a hundred thousand small files
            return blake2b(block(0), digest_size=16).hexdigest()
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            blocks = pool.map(block, range(0, self.size, HASH_BLOCK))
            return blake2b(b"".join(blocks), digest_size=16).hexdigest()


def data_file(path: Path, kind: str, name: str | None = None) -> DataFile:
    stamp = _stamp(path)
    return DataFile(path, name or str(path), kind, stamp[0], stamp)


def find_files(written: str) -> list[Path] | None:
    """The files that `written` names, sorted; None if it may be a hub id. Raises DataError if no file is there."""
    path = expand_path(written)
    if written.startswith(BUILTIN):
        return [_builtin(written)]
    if os.path.isdir(path):  # os.path returns False for a name that is too long or has odd characters; Path may raise
        return _walk(path)
    if os.path.exists(path):
        return [path]
    if glob.has_magic(written):
        found = sorted(match for match in map(Path, glob.glob(str(path), recursive=True)) if os.path.isfile(match))
        if not found:
            raise DataError(f"{written}: the glob matches no file (searched from {Path.cwd()}).{_closest_path(path)}")
        return found
    if os.path.islink(path):
        raise DataError(f"{written} is a broken link to {os.readlink(path)}. Correct it, or name the file.")
    if _looks_local(written, path):
        raise DataError(
            f"{written}: there is no such file or folder (looked for {path.absolute()}).{_closest_path(path)}"
        )
    return None


def without_companions(names: Sequence[str]) -> list[str]:
    """The paths of `names` that fxtune reads. If they are of several kinds, the companions of a dataset (its card, its
    license and so on) are left out, unless all files are companions."""
    kinds = {name: kind for name in names if (kind := _kind_by_name(name))}
    if len(set(kinds.values())) == 1:
        return list(kinds)
    return [name for name in kinds if os.path.basename(name).lower().split(".")[0] not in _COMPANIONS] or list(kinds)


def select_data_files(written: str, found: list[Path], limit: int | None) -> list[DataFile]:
    """The data files among `found`, which must be of one kind. With `limit`, the `size` of a JSONL file ends at the
    last row that is needed, and later files are left out. Raises DataError."""
    kinds: dict[str, list[Path]] = {}
    for path in found:
        if kind := _kind_by_name(path.name):
            require_file(path)
            kind = "jsonl" if kind == "json" and _is_jsonl(path) else kind
            kinds.setdefault(kind, []).append(path)
    if not kinds:
        suffixes = ", ".join(sorted({path.suffix or path.name for path in found}))
        raise DataError(
            f"{written}: no file that fxtune reads (found {suffixes}). It reads {' '.join(KINDS)}; unpack or convert "
            "others, and add a suffix that is missing."
        )
    if len(kinds) > 1:
        globs = [Path(written.split("*")[0]) / "**" / f"*{paths[0].suffix}" for paths in kinds.values()]
        mixed = "; ".join(
            f"{kind}: {paths[0].name}{f' and {len(paths) - 1} more' * (len(paths) > 1)}"
            for kind, paths in kinds.items()
        )
        raise DataError(
            f"{written} holds files of several kinds ({mixed}). Make each kind a separate source, with a glob "
            f"such as {globs[0]}: data.sources=[{', '.join(f'{{path: {each}}}' for each in globs)}] in the recipe."
        )
    ((kind, paths),) = kinds.items()
    files: list[DataFile] = []
    left = limit
    for path in paths:
        file = data_file(path, kind, written if written.startswith(BUILTIN) else None)
        if file.size == 0:
            raise DataError(f"{path} is empty. Remove it, or write it again.")
        with _open(path) as opened:
            first = opened.read(2)
        # UTF-16 without a mark: a first character of ASCII has a byte 0.
        if first in (BOM_UTF16_LE, BOM_UTF16_BE) or (b"\0" in first and kind in ("jsonl", "json", "csv", "text")):
            raise DataError(f"{path} is UTF-16, and {NOT_UTF8.replace('LATIN1', 'UTF-16')}.")
        if first == b"\x1f\x8b" and not file.compressed:
            advice = f"Name it {path.name}.gz" if kind == "jsonl" else "Unpack it (gunzip)"
            raise DataError(f"{path} is compressed by gzip, which its name does not say. {advice}.")
        if left is not None and kind == "jsonl" and not file.compressed:
            size, count = _bytes_of_rows(path, left)
            file, left = replace(file, size=size), left - count
        files.append(file)
        if left == 0:
            break
    return files


def require_file(path: Path) -> None:
    """Raise DataError if `path` exists and is not a regular file."""
    if (found := kind_of(path)) not in (None, FILE):
        raise DataError(f"{path} is {found}, not a file. Write its content to a file and name the file.")


def expand_path(written: str) -> Path:
    """Put home folders in place of `~` and `~name`. Path.expanduser raises for unknown users; here `~name` stays."""
    return Path(os.path.expanduser(written))


def _builtin(name: str) -> Path:
    folder = Path(__file__).parents[2] / "assets" / "data"
    path = folder / (name.removeprefix(BUILTIN) + ".jsonl")
    if not path.is_file():
        shipped = [BUILTIN + other.stem for other in sorted(folder.glob("*.jsonl"))]
        raise DataError(f"{name} does not ship with fxtune. Builtin data: {', '.join(shipped) or 'none'}.")
    return path


def _walk(folder: Path) -> list[Path]:
    """The files below a folder, sorted. Hidden files are left out, and each linked folder is entered once."""
    found: list[Path] = []
    entered = set[str]()
    for parent, folders, names in os.walk(folder, followlinks=True):
        is_new = (real := os.path.realpath(parent)) not in entered
        entered.add(real)
        folders[:] = sorted(name for name in folders if is_new and not name.startswith("."))
        found += [Path(parent, name) for name in names if is_new and not name.startswith(".")]
    if not found:
        raise DataError(f"{folder} is an empty folder. Put data files in it, or correct the path.")
    return sorted(found)


def _kind_by_name(name: str) -> str | None:
    return next((kind for suffix, kind in KINDS.items() if name.lower().endswith(suffix)), None)


def _is_jsonl(path: Path) -> bool:
    """Whether a .json file has JSONL: its first line is an object, and lines follow or the object has a format."""
    with _open(path) as file:
        line, _, rest = file.read(1 << 20).removeprefix(b"\xef\xbb\xbf").lstrip().partition(b"\n")
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and (bool(rest.strip()) or row_format(value) is not None)


def _bytes_of_rows(path: Path, count: int) -> tuple[int, int]:
    """Returns (bytes of the first `count` rows of a JSONL file, number of these rows). A short file has fewer."""
    size = rows = 0
    with _open(path) as file:
        for line, length in bounded_lines(file, b"\n"):
            size += length
            rows += bool(line.strip())
            if rows == count:
                break
    return size, rows


def _open(path: Path) -> BinaryIO:
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
    """Whether `written` names a file or folder and not a hub dataset."""
    return (
        _HUB_ID.fullmatch(written) is None
        or path.name.lower().endswith((*KINDS, *PACKED))
        or (len(path.parts) > 1 and os.path.isdir(path.parts[0]))
    )


def _closest_path(path: Path) -> str:
    """A hint for a missing path: the closest name to its first missing part, or the names in that part's folder."""
    path = path.absolute()
    while not os.path.isdir(path.parent):
        path = path.parent
    names = sorted(os.listdir(path.parent))
    close = nearest(path.name, names)
    close = close or next((name for name in names if nearest(path.stem, [name.split(".")[0]])), None)
    if close:
        return f" Did you mean {path.parent / close}?"
    return f" {path.parent} holds {', '.join(names[:8]) or 'nothing'}{' ...' if len(names) > 8 else ''}."
