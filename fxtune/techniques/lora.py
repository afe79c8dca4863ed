"""Low-rank adapters through peft: LoRA, rsLoRA, DoRA. Off: full fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from fxtune.technique import Technique


class AdapterInit(str, Enum):
    default = "default"
    gaussian = "gaussian"
    pissa = "pissa"
    olora = "olora"


@dataclass
class Lora(Technique):
    r: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    target_modules: list[str] = field(default_factory=lambda: ["all-linear"])
    """Names of the linears to adapt, or `all-linear` (all but the head)."""
    modules_to_save: list[str] = field(default_factory=list)
    """Modules trained in full and saved with the adapter."""
    rslora: bool = False
    """Scale by alpha / sqrt(r) in place of alpha / r (arXiv 2312.03732)."""
    dora: bool = False
    """Decompose weights into magnitude and direction (arXiv 2402.09353)."""
    init: AdapterInit = AdapterInit.default
