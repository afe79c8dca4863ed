"""Turns YAML files and command lines into typed dataclasses."""
