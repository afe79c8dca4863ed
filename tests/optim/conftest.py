"""Apex is replaced by a stand-in for all tests of optimizers."""

from __future__ import annotations

import pytest
from support import apex_standin


@pytest.fixture(autouse=True)
def _apex(monkeypatch):
    """NVIDIA's Apex is rarely installed; apex_standin.py says what its stand-in tests."""
    apex_standin.install(monkeypatch)
