"""From rows to tokens, with the supervised tokens marked."""
