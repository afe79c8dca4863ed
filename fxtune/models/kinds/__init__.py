"""Kinds of models, one file each. base.py says what a kind is, known.py which kind a config has."""
