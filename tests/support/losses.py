"""What linear_log_probs() of fxtune/kernels is compared with."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from fxtune.kernels.linear_cross_entropy import scale_and_cap


def reference_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    scale: float = 1.0,
    cap: float = 0.0,
) -> torch.Tensor:
    """linear_log_probs() with all logits at once, by plain autograd."""
    logits = scale_and_cap(F.linear(hidden, weight, bias), scale, cap)
    return -F.cross_entropy(logits.float(), labels, reduction="none")
