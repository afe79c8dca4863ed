"""A digest of fxtune's own source: in a checkout the version does not say what runs."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1]


def digest(part: str = ".") -> str:
    """Twelve hexadecimal digits that change with the source of fxtune, or of `part` of it, a folder in the package."""
    return _digest(PACKAGE / part)


@lru_cache
def _digest(folder: Path) -> str:
    # Once a process: what was imported stays, whatever becomes of the files.
    whole = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        text = file.read_bytes()
        whole.update(f"{file.relative_to(folder)} {len(text)}\n".encode() + text)
    return whole.hexdigest()[:12]
