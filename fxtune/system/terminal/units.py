"""Bytes and seconds as text with a unit."""

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
