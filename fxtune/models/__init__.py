"""Hugging Face models and adapters: kinds, reading, structure."""
