"""Tests of the compiler start without compiled code, and some skip its last stage."""

from __future__ import annotations

import functools

import pytest
import torch


@pytest.fixture(autouse=True)
def _fresh_compiler():
    """Each test compiles for itself, and leaves torch's limits as they were."""
    config = torch._dynamo.config
    with config.patch(
        recompile_limit=config.recompile_limit, accumulated_recompile_limit=config.accumulated_recompile_limit
    ):
        torch._dynamo.reset()
        yield


@pytest.fixture
def quick(monkeypatch):
    """Trace, guard and break as usual, but run the graphs without generating C++."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
