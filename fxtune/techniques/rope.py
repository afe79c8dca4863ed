"""RoPE scaling (YaRN, linear, dynamic, Llama 3), written into the config before the model is built."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Optional

from fxtune.technique import Technique


class RopeType(str, Enum):
    yarn = "yarn"
    linear = "linear"
    dynamic = "dynamic"
    llama3 = "llama3"


@dataclass
class Rope(Technique):
    type: RopeType = RopeType.yarn
    factor: float = 1.0
    """The new context as a multiple of the original one."""
    original_max_position_embeddings: Optional[int] = None
    """The context that the model was trained on; null: the model config's max_position_embeddings."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: Optional[float] = None
    """Scale of the attention logits; null: 0.1 ln(factor) + 1 (YaRN's formula)."""
    low_freq_factor: float = 1.0
    """llama3 only."""
    high_freq_factor: float = 4.0
    """llama3 only."""
