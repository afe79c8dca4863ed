"""Private parts of flash-attn-4."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def forward(interface: Any) -> Callable[..., Any]:
    """The kernel of the forward pass.

    What: _flash_attn_fwd of flash_attn.cute.interface.
    Why: torch.compile cannot trace the public functions.
    """
    kernel: Callable[..., Any] = interface._flash_attn_fwd
    return kernel


def backward(interface: Any) -> Callable[..., Any]:
    """The kernels of the backward pass: _flash_attn_bwd, for the reasons of forward()."""
    kernel: Callable[..., Any] = interface._flash_attn_bwd
    return kernel
