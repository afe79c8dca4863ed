"""Activation checkpointing: layers recompute, keep or offload their activations."""
