"""Bytes, seconds and counts as text with a unit."""

import re

MIB = 2**20
GIB = 2**30


def format_bytes(count: float) -> str:
    """15.2 GiB, 8.4 MiB, 0.5 KiB."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB")):
        if count >= unit / 10:
            return f"{count / unit:,.1f} {name}"
    return f"{count / 1024:,.1f} KiB"


def format_seconds(seconds: float) -> str:
    """41 s, 12 min, 3.5 h, 2.1 days."""
    if seconds < 90:
        return f"{seconds:,.3g} s"
    if seconds < 5400:
        return f"{seconds / 60:,.0f} min"
    return f"{seconds / 3600:,.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:,.1f} days"


def counted(count: int, text: str) -> str:
    """3 documents were cut; 1 document was cut. `text` begins with a plural noun and may have a verb."""
    if count == 1:
        text = re.sub(r"^(\w+)s\b( or piece)?(?(2)s)", r"\1\2", text)
        text = re.sub(r"\b(were|are)\b", lambda verb: {"were": "was", "are": "is"}[verb[0]], text, count=1)
    return f"{count:,} {text}"
