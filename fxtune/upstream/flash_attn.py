"""Private parts of flash-attn-4.

What: _flash_attn_fwd and _flash_attn_bwd of flash_attn.cute.interface.
Why: torch.compile cannot trace the public functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def forward(interface: Any) -> Callable[..., Any]:
    return interface._flash_attn_fwd


def backward(interface: Any) -> Callable[..., Any]:
    return interface._flash_attn_bwd
