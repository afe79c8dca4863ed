"""The optimizers, from libraries, and the parameter groups they get."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class OptimizerName(str, Enum):
    adamw = "adamw"
    sgd = "sgd"
    adafactor = "adafactor"
    lion = "lion"
    muon = "muon"


@dataclass
class OptimizerConfig:
    name: OptimizerName = OptimizerName.adamw
    lr: float = 2e-4
    """Peak learning rate."""
    weight_decay: float = 0.0
    """Decoupled weight decay; norms, biases and other 1-d parameters get none."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """AdamW's and Lion's two decay rates (Lion's authors advise 0.9, 0.99)."""
    eps: float = 1e-8
    momentum: float = 0.9
    """SGD's and Muon's momentum."""
    fused: bool = True
    """One kernel for all parameters, where torch has it (AdamW and SGD)."""
