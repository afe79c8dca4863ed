"""Rows to batches: read, chat, tokenized, batches."""
