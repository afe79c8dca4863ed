"""Answers that the model writes in each step, their rewards, and the batches that it learns from."""
