"""Reads files and hub datasets as rows."""
