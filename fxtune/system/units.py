"""Units of memory in bytes."""

MIB = 2**20
GIB = 2**30


def size(number: float) -> str:
    """Bytes in words: 15.2 GiB, 8.4 MiB, 0.5 KiB."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB")):
        if number >= unit / 10:
            return f"{number / unit:,.1f} {name}"
    return f"{number / 1024:,.1f} KiB"
