"""Hugging Face models and adapters: loading, saving, structure."""
