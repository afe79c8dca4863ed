"""Autocast and TF32."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from fxtune.technique import Technique


class Autocast(str, Enum):
    none = "none"
    bfloat16 = "bfloat16"


@dataclass
class Precision(Technique):
    enabled: bool = True
    autocast: Autocast = Autocast.none
    """Run matmuls in this dtype while the weights keep theirs."""
    tf32: bool = True
    """Let float32 matmuls use TF32 on cards that have it (Ampere and newer). No effect, and none claimed, elsewhere."""
