"""Where figures go: terminal, JSONL, W&B, TensorBoard."""
