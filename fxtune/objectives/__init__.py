"""Training objectives. Each is one file with a subclass of Objective (base.py)."""
