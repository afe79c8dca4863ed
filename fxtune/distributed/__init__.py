"""Ranks: the device of each, what they decide and sum together, and how they are started and watched."""
