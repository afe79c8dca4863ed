"""Images of rows: where they are, what their pixels are, and how many tokens they take."""
