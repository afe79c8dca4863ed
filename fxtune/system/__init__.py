"""The machine and this process: memory, signals, files, caches, secrets. No code here depends on models."""
