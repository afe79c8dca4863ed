"""Kinds of models, a file or a package each. decoder.py says what a kind is, known.py which kind a config has."""
