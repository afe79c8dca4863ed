"""The machine and this process: memory, signals, files, caches, secrets. Knows nothing of models."""
