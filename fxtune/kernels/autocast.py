"""The dtype that an operation computes in."""

from __future__ import annotations

import torch


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """Autocast's dtype if autocast is on, otherwise x's dtype. torch has no autocast for the meta device."""
    device = x.device.type
    if device == "meta":
        return x.dtype
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
