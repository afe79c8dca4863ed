"""Attention backends, one file each. A backend is in use once registry.py lists it."""
