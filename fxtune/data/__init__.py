"""From rows to batches, in four packages: read, chat, tokenized, batches."""
