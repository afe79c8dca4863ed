"""Searches for fast settings and for good hyper-parameters."""
