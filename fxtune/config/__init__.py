"""YAML and command line to typed dataclasses."""
