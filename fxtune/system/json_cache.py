"""A cache of small results in one JSON file, which several processes may read and extend at the same time."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from fxtune.system.atomic_files import replace_text


def read_cached(path: Path) -> dict[str, Any]:
    """All results; none if the file does not exist or is damaged."""
    try:
        results = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return results if isinstance(results, dict) else {}


def add_cached(path: Path, results: dict[str, Any]) -> None:
    """Add results to the file. A lock keeps results that another process adds at the same time. An error of the disk
    is ignored: the file is only a cache.
    """
    from filelock import FileLock

    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock")):
            replace_text(path, json.dumps({**read_cached(path), **results}, indent=1), shared=True)
