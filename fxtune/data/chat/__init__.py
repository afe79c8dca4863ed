"""Rows to text with the supervised characters marked."""
