"""This machine: its memory, cores, cards and installed packages."""
