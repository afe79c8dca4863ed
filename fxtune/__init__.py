"""fxtune: fine-tune Hugging Face language models from short recipes, fast, and prove that every option acted."""

__version__ = "0.1.0"
