"""Ranks: their devices, their common decisions and sums, and how they are started and watched."""
