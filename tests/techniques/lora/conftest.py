"""A family with biases."""

from __future__ import annotations

import pytest
from support.architectures import FAMILIES, SIZES


@pytest.fixture(autouse=True)
def _qwen2(monkeypatch):
    """A family whose q, k and v have biases."""
    monkeypatch.setitem(FAMILIES, "qwen2", {"model_type": "qwen2", **SIZES})
