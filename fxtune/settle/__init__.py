"""Decides what will run, from a config and a machine. settle() is used by training and by every command."""
