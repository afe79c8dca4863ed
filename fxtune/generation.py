"""Greedy answers to held-out questions, and how many are exactly right."""
