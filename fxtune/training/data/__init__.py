"""The data of a run, and what is computed of it before the first step."""
