"""The token cache: one folder for each table, named by a hash of all that the tokens depend on.

A process locks a table, writes it to a staging folder, and renames this folder when the table is complete. If two runs
start together, one tokenizes and the other waits. After a kill at any moment, the table is complete or does not exist.
An open table is locked against removal.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from fxtune.data.config import DataConfig
from fxtune.errors import FILE, FOLDER, StorageError, kind_of
from fxtune.system.machine.host import cache_home

META, CHECKSUMS = "table.json", "checksums"
"""The JSON file of a table, and its entry with the checksums."""
BLOCK, BLOCKS = 16 << 20, 32
"""Bytes of a block with a checksum, and how many blocks of a file are read at most, which takes 0.1 s if the file is
in memory. A file of 10 GB is checked in part, because each start of a run would have to read all of it."""


def cache_root(data: DataConfig) -> Path:
    return Path(os.path.expanduser(data.cache_dir)).absolute() if data.cache_dir else cache_home()


def _staging_folder(folder: Path) -> Path:
    return folder.with_name(folder.name + ".staging")


def checksums(folder: Path, meta: dict[str, Any]) -> dict[str, list[int]]:
    """CRC-32 of the blocks of each file of a table, and of `meta`, its JSON, without the checksums. Raises OSError."""
    text = json.dumps({key: value for key, value in meta.items() if key != CHECKSUMS})
    found = {META: [zlib.crc32(text.encode())]}
    for name, size in meta["sizes"].items():
        blocks = range(0, size, BLOCK)
        with open(folder / name, "rb") as file:
            read = blocks[:: -(-len(blocks) // BLOCKS) or 1]
            found[name] = [zlib.crc32(os.pread(file.fileno(), BLOCK, start)) for start in read]
    return found


@contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """A context manager with the path of a table's staging folder. The staging folder replaces `folder` if the body
    raises no error. The caller holds the table's lock, so only a dead process can have left an older staging folder.
    """
    staging = _staging_folder(folder)
    shutil.rmtree(staging, ignore_errors=True)
    try:
        yield staging
        shutil.rmtree(folder, ignore_errors=True)
        staging.rename(folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _lock_file(folder: Path) -> Path:
    return folder.with_name(folder.name + ".lock")


@contextmanager
def locked(folder: Path, source: str) -> Iterator[None]:
    """A context manager that holds the lock of a table, for building the table or checking whether it is complete."""
    from filelock import FileLock, Timeout

    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(_lock_file(folder))
    try:
        lock.acquire(timeout=1)
    except Timeout:
        print(
            f"Another process is tokenizing {source}; waiting for it. (A run that shares its data.cache_dir with no "
            "other run never waits.)",
            flush=True,
        )
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def keep_from_removal(folder: Path) -> IO[bytes] | None:
    """Record that a table is in use. While the returned file is open, remove_unused() of other processes keeps the
    table. Returns None on a file system that is read-only or has no locks."""
    try:
        locked_file = open(folder / META, "rb")  # noqa: SIM115 - stays open as long as the table
        fcntl.flock(locked_file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        os.utime(folder / META)
    except OSError:
        return None
    return locked_file


def remove_unused(root: Path, days: float) -> tuple[int, int]:
    """Remove tables and staging folders that no run used for `days` days. Returns (folders removed, bytes freed)."""
    removed = freed = 0
    for folder in sorted(root.glob("*/")):
        try:
            if kind_of(folder / META) not in (None, FILE):  # opening a pipe would wait for its writer
                continue
            files = list(folder.iterdir())
            if time.time() - max(path.stat().st_mtime for path in (folder, *files)) < days * 86400:
                continue
            with open(folder / META, "ab") as locked_file:  # "a" creates the file: a staging folder may lack it
                fcntl.flock(locked_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                size = sum(path.stat().st_size for path in folder.iterdir())
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # another process has the table open, or removed it
            continue
        removed, freed = removed + 1, freed + size
    return removed, freed


def require_usable_paths(folder: Path, files: list[str]) -> None:
    """Raise StorageError if a path of a table has something of another kind, such as a folder in place of a file."""
    wanted = {folder: FOLDER, _staging_folder(folder): FOLDER, _lock_file(folder): FILE}
    for path, kind in (wanted | {folder / name: FILE for name in files}).items():
        if (found := kind_of(path)) not in (None, kind):
            raise StorageError(
                f"{path} is {found}, but the token cache needs {kind} there. Remove it, or set data.cache_dir to "
                "another folder."
            )
