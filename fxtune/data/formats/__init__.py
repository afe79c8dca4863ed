"""Row formats: what the columns of a row mean. One file for each format, listed in registry.py."""
