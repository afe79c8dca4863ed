"""A tokenised source on disk: four arrays, the rows that could not be used, and a JSON file that says what they should be.

The arrays are plain .npy files, opened as memory maps: a table of a hundred gigabytes opens at once, is shared by all
processes through the page cache, and pickles as the name of its folder.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from fxtune.data.read.formats import RowFormat
from fxtune.errors import FILE, FOLDER, StorageError, kind_of

ARRAYS = {"ids": np.int32, "supervised": np.bool_, "offsets": np.int64, "digests": np.uint64}
META = "table.json"
BAD_ROWS = "bad_rows.jsonl"
_PLACE = re.compile(r"(.*)((?::| row )\d+)", re.DOTALL)


class TokenTable:
    """Documents of one source as token ids, in the order of the source.

    Attributes:
        ids: int32 [tokens].
        supervised: bool [tokens], whether the token is a target.
        offsets: int64 [documents + 1]; document i is ids[offsets[i]:offsets[i + 1]].
        digests: uint64 [documents], a hash of each document's ids, the same on every machine.
        fingerprint: hash of the content and of every setting that the tokens depend on.
        name: the source, as the user wrote it.
        format: the rows' format.
        bad_rows: rows that could not be used.
        literal: documents in which special tokens that somebody wrote were tokenised as text.
    """

    ids: np.ndarray
    supervised: np.ndarray
    offsets: np.ndarray
    digests: np.ndarray

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self._lease = lease(folder)
        meta = read_meta(folder)
        assert meta is not None, f"{folder} is no whole token table"
        self.fingerprint: str = meta["fingerprint"]
        self.format = RowFormat(meta["format"])
        self.bad_rows: int = meta["bad_rows"]
        self.literal: int = meta["literal"]
        self.supervised_tokens: int = meta["supervised"]
        self._files: list[str] = meta["files"]
        for key in ARRAYS:
            setattr(self, key, np.load(folder / f"{key}.npy", mmap_mode="r"))

    def __len__(self) -> int:
        return len(self.digests)

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenTable, (self.folder, self.name)

    def bad(self, files: list[str] | None = None) -> Iterator[dict[str, Any]]:
        """The rows that could not be used: {where, error, row}. `files`: the source's files as they are called now; the
        table may have been made from a copy of another name."""
        names = dict(zip(self._files, files or self._files, strict=True))
        with open(self.folder / BAD_ROWS, encoding="utf-8") as lines:
            for line in lines:
                entry = json.loads(line)
                yield {"where": names[entry["file"]] + entry["place"], "error": entry["error"], "row": entry["row"]}


def lease(folder: Path) -> IO[bytes] | None:
    """An open file that keeps other processes from removing a table (tidy) until it is closed, if only by the process's end.
    The table is used now, and that is noted. None: a file system without locks, or one that is read-only."""
    try:
        held = open(folder / META, "rb")  # noqa: SIM115 - held as long as the table
        fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
        os.utime(folder / META)
    except OSError:
        return None
    return held


def tidy(root: Path, days: float) -> tuple[int, int]:
    """Remove the tables below `root` that no process has open and none used for `days`, and what killed processes left half
    done so long ago. Returns how many, and their bytes."""
    removed = freed = 0
    for folder in sorted(root.glob("*/")):
        try:
            if kind_of(folder / META) not in (None, FILE):  # opened it would be waited for
                continue
            if time.time() - max(path.stat().st_mtime for path in (folder, *folder.iterdir())) < days * 86400:
                continue
            with open(folder / META, "ab") as held:  # one that never was whole gets it, and goes with it
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                freed += _remove(folder)
        except OSError:  # somebody has it open, or removed it
            continue
        removed += 1
    return removed, freed


def _remove(folder: Path) -> int:
    size = sum(path.stat().st_size for path in folder.iterdir())
    shutil.rmtree(folder, ignore_errors=True)
    return size


def staging_of(folder: Path) -> Path:
    """Where a table is written before it is whole."""
    return folder.with_name(folder.name + ".staging")


def lock_of(folder: Path) -> Path:
    """The file that whoever makes a table, or looks whether it is whole, holds the lock of."""
    return folder.with_name(folder.name + ".lock")


def require_own(folder: Path) -> None:
    """Refuse a table in whose place, or in the place of one of whose files, something else lies. Raises StorageError."""
    files = [META, BAD_ROWS, *(f"{key}.npy" for key in ARRAYS)]
    wanted = {
        folder: FOLDER,
        staging_of(folder): FOLDER,
        lock_of(folder): FILE,
        **{folder / name: FILE for name in files},
    }
    for path, kind in wanted.items():
        if (found := kind_of(path)) not in (None, kind):
            raise StorageError(
                f"{path} is {found}, and the token cache has {kind} there. Remove it, or set data.cache_dir to "
                "another folder."
            )


def read_meta(folder: Path) -> dict[str, Any] | None:
    """What a table's JSON says; None where there is no table, or where it is not whole (a crash, a full disk, a stray hand)."""
    try:
        meta = json.loads((folder / META).read_text())
        sizes = {name: (folder / name).stat().st_size for name in meta["sizes"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return meta if sizes == meta["sizes"] else None


@dataclass
class BadRow:
    where: str
    error: str
    row: Any


@dataclass
class Encoded:
    """What becomes of one shard. The arrays are as in TokenTable, with each document's length in place of offsets."""

    ids: np.ndarray
    supervised: np.ndarray
    lengths: np.ndarray
    digests: np.ndarray
    bad: list[BadRow] = field(default_factory=list)
    literal: int = 0
    """Documents in which special tokens were tokenised as text."""


class TableWriter:
    """Writes a table front to back; nothing of it is held in memory. A context: left by an exception, nothing is finished."""

    def __init__(self, folder: Path, files: list[str]) -> None:
        self.folder, self.files = folder, dict.fromkeys(files)
        self.documents = self.tokens = self.supervised = self.bad_rows = self.literal = 0
        self.first_bad: BadRow | None = None
        folder.mkdir(parents=True)
        self._bad = open(folder / BAD_ROWS, "w", encoding="utf-8")  # noqa: SIM115 - closed by __exit__
        self._arrays = {key: _NpyFile(folder / f"{key}.npy", np.dtype(kind)) for key, kind in ARRAYS.items()}
        self._arrays["offsets"].append(np.zeros(1))

    def append(self, part: Encoded) -> None:
        self._arrays["ids"].append(part.ids)
        self._arrays["supervised"].append(part.supervised)
        self._arrays["offsets"].append(self.tokens + np.cumsum(part.lengths, dtype=np.int64))
        self._arrays["digests"].append(part.digests)
        self.documents += len(part.lengths)
        self.tokens += len(part.ids)
        self.supervised += int(part.supervised.sum())
        self.bad_rows += len(part.bad)
        self.literal += part.literal
        self.first_bad = self.first_bad or next(iter(part.bad), None)
        for bad in part.bad:
            file, place = self._parts(bad.where)
            entry = {"file": file, "place": place, "error": bad.error, "row": bad.row}
            self._bad.write(json.dumps(entry, default=str) + "\n")

    def _parts(self, where: str) -> tuple[str, str]:
        """`a.jsonl:17` or `a.parquet row 5` as file and place, kept apart because the file may be called otherwise next time."""
        found = _PLACE.fullmatch(where)
        if found is None or found[1] not in self.files:
            return where, ""
        return found[1], found[2]

    def finish(self, **meta: Any) -> None:
        """Write the headers and the JSON, and bring all of it to the disk."""
        for array in self._arrays.values():
            array.finish()
        self._bad.flush()
        os.fsync(self._bad.fileno())
        names = [BAD_ROWS, *(f"{key}.npy" for key in ARRAYS)]
        meta |= dict(
            documents=self.documents,
            tokens=self.tokens,
            supervised=self.supervised,
            bad_rows=self.bad_rows,
            literal=self.literal,
            files=list(self.files),
            sizes={name: (self.folder / name).stat().st_size for name in names},
        )
        with open(self.folder / META, "w", encoding="utf-8") as file:
            json.dump(meta, file, indent=1)
            file.flush()
            os.fsync(file.fileno())

    def __enter__(self) -> TableWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bad.close()
        for array in self._arrays.values():
            array.file.close()


class _NpyFile:
    """A one-dimensional .npy file whose length is known only at the end. numpy's header leaves room for it to grow."""

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        self.file: IO[bytes] = open(path, "wb")  # noqa: SIM115 - closed by the TableWriter
        self.dtype, self.length = dtype, 0
        self._header()

    def append(self, values: np.ndarray) -> None:
        self.file.write(np.ascontiguousarray(values, self.dtype).data)
        self.length += len(values)

    def finish(self) -> None:
        self.file.seek(0)
        self._header()
        self.file.flush()
        os.fsync(self.file.fileno())

    def _header(self) -> None:
        about = {"descr": npy.dtype_to_descr(self.dtype), "fortran_order": False, "shape": (self.length,)}
        npy.write_array_header_1_0(self.file, about)
