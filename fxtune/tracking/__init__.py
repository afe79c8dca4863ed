"""Reporting of metrics: terminal, JSONL, W&B, TensorBoard."""
