"""The folder in which torch.compile keeps compiled code: one for each version of fxtune's own operators.

torch's cache key for a compiled graph has only the names of its torch.library operators. So torch would load a graph
that was compiled with an older version of an operator. Such a graph fails or gives wrong numbers. Therefore the
folder's name has a digest of all source that defines operators or checkpointing policies (SOURCES). torch's tag for
this, `torch.compiler.config.cache_key_tag`, applies only to the thread that sets it, and backward passes are compiled
in another thread.

A kill while a C++ compiler links leaves a truncated library under its final name, which no later run can load. Such
files are deleted at the start of a run.

Each process holds a shared lock on its folder until it ends. The most recently used of the unlocked folders are kept,
so that switching between two versions stays fast. The others are removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import struct
import sys
from pathlib import Path

from filelock import FileLock, Timeout

from fxtune.system.files import code_digest
from fxtune.system.machine.host import cache_home
from fxtune.upstream.torch import default_compiler_cache

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
SOURCES = ("kernels", "techniques/checkpointing", "techniques/compile", "upstream")
"""Folders whose code decides what a compiled graph computes. torch's cache key does not cover this code."""
FOLDER_NAME = re.compile(r"fxtune-[0-9a-f]{12}")
KEPT = 2
"""How many folders that no process has locked are kept."""

_LOCKS: dict[Path, int] = {}
"""File descriptors of this process's locks, by folder. The locks are released when the process ends."""


def use_cache_folder() -> Path | None:
    """Let torch.compile use this version's folder, and return the folder; None if no folder can be written. The folder
    is in the folder that TORCHINDUCTOR_CACHE_DIR names, otherwise in fxtune's cache or else in torch's default."""
    own = cache_home() / "inductor"
    # When torch first needs the folder, it writes its default, a folder below /tmp, into the variable.
    default = default_compiler_cache()
    given = Path(os.environ.get(VARIABLE) or default)
    root = given.parent if FOLDER_NAME.fullmatch(given.name) else given
    for parent in (own, default) if root == default else (root,):
        folder = parent / f"fxtune-{code_digest.digest(*SOURCES)}"
        try:
            parent.mkdir(parents=True, exist_ok=True)
            lock_shared(folder)
            folder.mkdir(exist_ok=True)
            remove_truncated_libraries(folder)
        except OSError:
            continue
        os.environ[VARIABLE] = str(folder)
        if parent == own:
            remove_unused(own)
        return folder
    return None


def lock_shared(folder: Path) -> None:
    """Keep other processes from removing `folder`, and record that it is used now. The folder need not exist yet."""
    file = folder.with_suffix(".lock")
    if folder not in _LOCKS:
        while True:
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH)
            except OSError:  # a file system without locks: no process can lock exclusively, so all folders stay
                break
            if _is_file(descriptor, file):
                break
            os.close(descriptor)  # another process removed the file with its folder
        _LOCKS[folder] = descriptor
    os.utime(file)


def remove_truncated_libraries(folder: Path) -> None:
    """Remove truncated libraries. A library stays if another process is linking it now, and so holds torch's lock."""
    for library in folder.rglob("*.so"):
        if is_truncated(library):
            lock = FileLock(folder / "locks" / f"{library.name.partition('.')[0]}.lock", timeout=0)
            with contextlib.suppress(Timeout), lock:
                if is_truncated(library):
                    library.unlink(missing_ok=True)


def is_truncated(library: Path) -> bool:
    """Whether a Linux library ends before the end of its section table, which linkers write last (ELF-64, elf(5))."""
    try:
        with library.open("rb") as stream:
            header = stream.read(64)
    except OSError:
        return False
    if len(header) < 64 or header[:4] != b"\x7fELF":
        return sys.platform == "linux"
    offset, entry_size, entries = struct.unpack_from("<Q10xHH", header, 40)
    return bool(library.stat().st_size < offset + entry_size * entries)


def remove_unused(root: Path) -> None:
    """Remove the folders below `root` that no process has locked, except the KEPT ones that were used last."""
    unlocked = [file for file in root.glob("fxtune-*.lock") if file.with_suffix("") not in _LOCKS]
    for file in sorted(unlocked, key=_last_used, reverse=True)[KEPT:]:
        # Another process may remove the folder first, or hold its lock.
        with contextlib.suppress(OSError), file.open("r+b") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_file(lock.fileno(), file):
                shutil.rmtree(file.with_suffix(""), ignore_errors=True)
                file.unlink(missing_ok=True)


def _last_used(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def _is_file(descriptor: int, file: Path) -> bool:
    """Whether the open file is still the file at this path."""
    try:
        return os.path.samestat(os.fstat(descriptor), file.stat())
    except OSError:
        return False
