"""Activation checkpointing: recompute, keep, or offload."""
