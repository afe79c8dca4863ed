"""Activation checkpointing: recompute a layer in the backward pass in place of keeping what it produced."""

from __future__ import annotations

from dataclasses import dataclass

from fxtune.technique import Technique


@dataclass
class Checkpointing(Technique):
    every: int = 1
    """Checkpoint one decoder layer in this many: 1 is all of them, 2 every other one."""
