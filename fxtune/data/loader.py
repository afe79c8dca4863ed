"""Batches on the device before they are asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional


@dataclass
class LoaderConfig:
    num_workers: Optional[int] = None
    """Processes that build batches; null: 0 on a CPU, 2 beside a GPU (a batch is a slice of a memory map, not work)."""
    pin_memory: Optional[bool] = None
    """Page-locked batches, for copies that overlap with compute; null: on beside a GPU."""
    persistent_workers: bool = True
    prefetch_factor: int = 4
    """Batches a worker keeps ready."""
