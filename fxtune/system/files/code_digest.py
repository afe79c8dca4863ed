"""A digest of fxtune's source code. In a checkout the version number does not identify the code that runs."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

PACKAGE = Path(__file__).parents[2]


@lru_cache  # computed once per process: imported code stays the same even if the files change
def digest(*parts: str) -> str:
    """Twelve hexadecimal digits that change with the source code. `parts`: folders of the package; by default all."""
    found = hashlib.sha256()
    for file in sorted({file for part in parts or (".",) for file in (PACKAGE / part).rglob("*.py")}):
        source = file.read_bytes()
        found.update(f"{file.relative_to(PACKAGE)} {len(source)}\n".encode() + source)
    return found.hexdigest()[:12]
