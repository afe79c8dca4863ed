"""Images of rows: their files, their pixels and their tokens."""
