"""Where the figures of a run go: metrics.jsonl always; Weights & Biases and TensorBoard when asked."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Optional


class WandbMode(str, Enum):
    disabled = "disabled"
    auto = "auto"
    online = "online"
    offline = "offline"


class Display(str, Enum):
    auto = "auto"
    rich = "rich"
    plain = "plain"
    none = "none"


@dataclass
class WandbConfig:
    mode: WandbMode = WandbMode.disabled
    """`auto`: online when an API key is at hand, offline otherwise."""
    project: str = "fxtune"
    entity: Optional[str] = None
    group: Optional[str] = None
    tags: list[str] = field(default_factory=list)
    init_timeout: float = 5.0
    """Seconds that a start may wait for W&B before it goes on offline."""


@dataclass
class TrackingConfig:
    wandb: WandbConfig = field(default_factory=WandbConfig)
    tensorboard: bool = False
    display: Display = Display.auto
    """`auto`: a live display on a terminal, one line a log interval elsewhere."""
