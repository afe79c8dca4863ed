"""Linears quantized by each kind and library."""

from __future__ import annotations

import pytest

KINDS = {
    "nf4": ("nf4", "bitsandbytes", True),
    "nf4_single": ("nf4", "bitsandbytes", False),
    "int8": ("int8", "bitsandbytes", True),
    "nf4_torchao": ("nf4", "torchao", True),
    "int8_torchao": ("int8", "torchao", True),
}
kinds = pytest.mark.parametrize("kind", KINDS)
