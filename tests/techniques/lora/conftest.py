"""A family with biases, and a small base model on disk."""

from __future__ import annotations

import pytest
from support.architectures import (
    FAMILIES,
    SIZES,
    on_disk,
)


@pytest.fixture(autouse=True)
def _qwen2(monkeypatch):
    """A family whose q, k and v have biases."""
    monkeypatch.setitem(FAMILIES, "qwen2", {"model_type": "qwen2", **SIZES})


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return on_disk(tmp_path_factory.mktemp("lora") / "base")
