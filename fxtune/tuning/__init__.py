"""Searches for fast settings."""
