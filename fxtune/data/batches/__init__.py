"""From token tables to the batches of each step."""
