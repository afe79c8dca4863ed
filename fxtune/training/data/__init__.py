"""The data of a run, and the numbers computed from it before the first step."""
