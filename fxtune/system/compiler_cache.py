"""Where the compiler keeps what it made: a folder for each state of our own operators.

torch finds a graph on disk by what is written in it, its inputs, torch's own source and its options. Of an operator of
torch.library that is the name. What it does and the shapes that it returns are not looked at: a graph that was compiled when
they were others would be loaded, and ends in an assertion about sizes, if not in wrong numbers. So the folder's name has a
digest of fxtune/kernels, where all such operators are, and so are the rules that selective checkpointing marks a graph by.
(torch's tag for this, `torch.compiler.config.cache_key_tag`, holds for the thread that sets it. Backward passes are compiled
in another one.)

A kill while a C++ compiler links leaves a library that is cut short under its final name, and torch, which looks at names alone,
would fail to load it in every run after that. `mend` removes such libraries when a run begins; they are compiled again.

Each process holds its folder by a shared lock, for as long as it lives. Of the folders that nobody holds the last used ones
stay, so that one can go back and forth between two versions, and the others are removed.
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

from fxtune.system import code_digest
from fxtune.system.host import cache_home

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
OURS = re.compile(r"fxtune-[0-9a-f]{12}")
KEPT = 2
"""Folders of other sources that stay."""

_HELD: dict[Path, int] = {}
"""Open files of the locks that this process has, by folder. They are given back when it ends."""


def keep_on_disk() -> Path | None:
    """Let torch.compile keep what it makes from now on in the folder of this source, which is returned.

    It lies in the folder that the environment names, or in fxtune's cache. None, and nothing changes: it cannot be written.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    # torch writes its default, below /tmp, into the environment when it is asked for the first time.
    elsewhere = Path(default_cache_dir())
    given, own = Path(os.environ.get(VARIABLE) or elsewhere), cache_home() / "inductor"
    root = given.parent if OURS.fullmatch(given.name) else given
    for place in (own, elsewhere) if root == elsewhere else (root,):
        folder = place / f"fxtune-{code_digest.digest('kernels')}"
        try:
            place.mkdir(parents=True, exist_ok=True)
            hold(folder)
            folder.mkdir(exist_ok=True)
            mend(folder)
        except OSError:
            continue
        os.environ[VARIABLE] = str(folder)
        if place == own:
            tidy(own)
        return folder
    return None


def hold(folder: Path) -> None:
    """Keep other processes from removing `folder`, also before it is there, and note that it is used now."""
    file = _lock_of(folder)
    if folder not in _HELD:
        while True:
            held = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(held, fcntl.LOCK_SH)
            except (
                OSError
            ):  # a file system without locks: there nobody gets the other lock either, and all folders stay
                break
            if _is(held, file):
                break
            os.close(held)  # removed with its folder, while we waited
        _HELD[folder] = held
    os.utime(file)


def mend(folder: Path) -> None:
    """Remove libraries that are cut short, but for those that another process is linking just now: it holds torch's lock."""
    for library in folder.rglob("*.so"):
        if cut_short(library):
            with (
                contextlib.suppress(Timeout),
                FileLock(folder / "locks" / f"{library.name.partition('.')[0]}.lock", timeout=0),
            ):
                if cut_short(library):
                    library.unlink(missing_ok=True)


def cut_short(library: Path) -> bool:
    """Whether a shared library of Linux ends before its table of sections does, which linkers write last (ELF-64, elf(5))."""
    try:
        with library.open("rb") as stream:
            head = stream.read(64)
    except OSError:
        return False
    if len(head) < 64 or head[:4] != b"\x7fELF":
        return sys.platform == "linux"
    at, size, count = struct.unpack_from("<Q10xHH", head, 40)
    return bool(library.stat().st_size < at + size * count)


def tidy(root: Path) -> None:
    """Remove the folders of other sources below `root` that no process holds, but for the KEPT ones that were used last."""
    free = [file for file in root.glob("fxtune-*.lock") if file.with_suffix("") not in _HELD]
    for file in sorted(free, key=_used, reverse=True)[KEPT:]:
        try:
            lock = os.open(file, os.O_RDWR)
        except OSError:  # another process was here first
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is(lock, file):
                shutil.rmtree(file.with_suffix(""), ignore_errors=True)
                file.unlink(missing_ok=True)
        except OSError:  # somebody holds it
            pass
        finally:
            os.close(lock)


def _lock_of(folder: Path) -> Path:
    return folder.with_suffix(".lock")


def _used(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def _is(opened: int, file: Path) -> bool:
    """Whether an open file is still the one of that name."""
    try:
        return os.path.samestat(os.fstat(opened), file.stat())
    except OSError:
        return False
