"""Units of memory and time in words."""

MIB = 2**20
GIB = 2**30


def size(number: float) -> str:
    """Bytes in words: 15.2 GiB, 8.4 MiB, 0.5 KiB."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB")):
        if number >= unit / 10:
            return f"{number / unit:,.1f} {name}"
    return f"{number / 1024:,.1f} KiB"


def duration(seconds: float) -> str:
    """Seconds in words: 41 s, 12 min, 3.5 h, 2.1 days."""
    if seconds < 90:
        return f"{seconds:,.3g} s"
    if seconds < 5400:
        return f"{seconds / 60:,.0f} min"
    return f"{seconds / 3600:,.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:,.1f} days"
