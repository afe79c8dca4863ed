"""Keeps the compiled files of installed packages in fxtune's cache where Python keeps none.

Many containers set PYTHONDONTWRITEBYTECODE, or have packages that nobody may write to. If the packages were also
installed without compiled files, as uv installs them, Python compiles thousands of files in each start.

With `sys.pycache_prefix` Python reads compiled files only below the prefix. So the prefix is set only if torch has no
compiled files. Python takes a compiled file for a source of the same time and size, and images of containers give all
files one time. So each set of package versions has its own prefix.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import zlib
from pathlib import Path

from fxtune.errors import StorageError
from fxtune.system.machine.host import cache_home

LARGEST = "torch"
"""The package that has most of the files. An installer compiles all packages or none."""


def keep_compiled_files() -> None:
    """Let this process and its children keep compiled files in fxtune's cache, if they would compile them in each
    start. A folder that the user chose (PYTHONPYCACHEPREFIX) stays. Call this before large packages are imported."""
    with contextlib.suppress(ImportError, OSError, StorageError):
        spec = importlib.util.find_spec(LARGEST)
        if sys.pycache_prefix or spec is None or not spec.cached or os.path.exists(spec.cached):
            return
        package = Path(spec.cached).parent.parent
        if sys.dont_write_bytecode or not os.access(package, os.W_OK):
            versions = sorted(name for name in os.listdir(package.parent) if name.endswith(".dist-info"))
            folder = cache_home() / "bytecode" / f"{zlib.crc32(repr(versions).encode()):08x}"
            folder.mkdir(parents=True, exist_ok=True)
            sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = str(folder)
            sys.dont_write_bytecode = False
            os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
