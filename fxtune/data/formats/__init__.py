"""Row formats: the meaning of a row's columns. Each format is one file; registry.py lists the formats."""
