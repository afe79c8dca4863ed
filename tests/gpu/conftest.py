"""Tests that need a GPU: they skip themselves where there is none, with one reason, and leave no memory behind.

Most of their time is the host's, which compiles: with pytest-xdist they take turns on the card, but for those that measure, which
need it for themselves:

    pytest tests/gpu -m 'not timed' -n 6 --dist worksteal && pytest tests/gpu -m timed

This folder is a package, unlike the others, so that this file does not stand in for tests/conftest.py where a test says
`from conftest import ...`. Its modules are imported on every machine, so they import what only a GPU machine has inside
their tests.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent
for folder in (HERE, HERE.parent):  # `import reference`, `from architectures import ...`
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

WHY = f"needs a GPU, and torch {torch.__version__} sees none here"


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a GPU; skipped where torch sees none")


def pytest_collection_modifyitems(items):
    """Everything in this folder is a GPU test, wherever pytest was started."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason=WHY))


@pytest.fixture(autouse=True)
def _as_found():
    """Seeds before each test; afterwards the process-wide switches that techniques set, and all memory, are given back."""
    torch.manual_seed(0)
    kept = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark, torch.are_deterministic_algorithms_enabled()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(kept[0])
    torch.backends.cudnn.benchmark = kept[1]
    torch.use_deterministic_algorithms(kept[2])
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
