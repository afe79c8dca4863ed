"""Checks of a recipe and a machine: verification, parity with plain transformers, benchmark, preview, system report,
links between GPUs."""
