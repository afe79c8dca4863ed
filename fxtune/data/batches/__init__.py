"""Token tables to the batches of each step."""
