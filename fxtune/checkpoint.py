"""Checkpoints: whole or absent, safetensors and JSON, never pickle."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class CheckpointConfig:
    every: int = 0
    """Save each time this many steps are done; 0: only at the end."""
    keep: int = 2
    """How many of the newest checkpoints stay."""
    keep_best: bool = True
    """Also keep the one with the lowest evaluation loss, however old."""
