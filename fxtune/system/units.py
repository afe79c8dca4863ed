"""Units of memory in bytes."""

GIB = 2**30
