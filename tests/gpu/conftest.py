"""Tests that need a GPU: they skip themselves where there is none, with one reason, and leave no memory behind.

Most of their time is the host's, which compiles: with pytest-xdist they take turns on the card, but for those that measure, which
need it for themselves:

    pytest tests/gpu -m 'not timed' -n 6 --dist worksteal && pytest tests/gpu -m timed

Of several cards each worker takes one, by its number (those that CUDA_VISIBLE_DEVICES names, where it is set); with as many
workers as cards those that measure may run beside each other, too: `pytest tests/gpu -m timed -n 8` on eight.

This folder is a package, unlike the others, so that this file does not stand in for tests/conftest.py where a test says
`from conftest import ...`. Its modules are imported on every machine, so they import what only a GPU machine has inside
their tests.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent

WHY = f"needs a GPU, and torch {torch.__version__} sees none here"


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a GPU; skipped where torch sees none")
    take_a_card()


def take_a_card() -> None:
    """Leave a worker of pytest-xdist one of several cards, and the processes that it starts; without workers all stay visible.

    CUDA reads the variable once, when it is initialised: this comes before test modules are imported, and counting cards does not
    initialise it.
    """
    worker, count = os.environ.get("PYTEST_XDIST_WORKER", ""), torch.cuda.device_count()
    if worker.startswith("gw") and count > 1:
        cards = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))).split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = cards[int(worker.removeprefix("gw")) % len(cards)].strip()


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
    kept = (
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.benchmark,
        torch.are_deterministic_algorithms_enabled(),
    )
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
