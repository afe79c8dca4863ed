"""Text to token tables, in several processes, cached."""
