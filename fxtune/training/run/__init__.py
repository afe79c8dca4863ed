"""The stages of a run: its start, its saved state, its log, its end."""
