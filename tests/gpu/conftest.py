"""Tests that need a GPU. Without one they skip with a reason. They free all GPU memory at their end.

The host spends most of their time on compilation, so several pytest-xdist workers can share one GPU. Tests that
measure time have the marker `timed` and need the GPU for themselves:

    pytest tests/gpu -m 'not timed' -n 6 --dist worksteal && pytest tests/gpu -m timed

Failures are printed as they come, because a limit of time may end the run before pytest's summary.

With several GPUs each worker uses one (the runs of test_two_cards.py use two), chosen by its number (from CUDA_VISIBLE_DEVICES if that is set). With as many
workers as GPUs the timed tests may also run in parallel: `pytest tests/gpu -m timed -n 8` on eight GPUs.

Unlike other test folders this one is a package, so that `from conftest import ...` still finds tests/conftest.py.
Every machine imports its modules, so they import packages of a GPU machine inside the tests.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent

SKIP_REASON = f"needs a GPU, and torch {torch.__version__} finds none on this machine"
CARDS: list[str] = []
"""All GPUs, as CUDA_VISIBLE_DEVICES names them, also in a worker that sees one."""


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a GPU; skipped if torch finds none")
    assign_gpu()


def assign_gpu() -> None:
    """Make one of several GPUs visible to a pytest-xdist worker and its child processes. Without workers all stay
    visible.

    CUDA reads CUDA_VISIBLE_DEVICES once, when it is initialized. This function runs before the test modules are
    imported, and torch.cuda.device_count() does not initialize CUDA.
    """
    worker, count = os.environ.get("PYTEST_XDIST_WORKER", ""), torch.cuda.device_count()
    names = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))).split(",")
    CARDS[:] = [name.strip() for name in names] if count else []
    if worker.startswith("gw") and count > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = CARDS[int(worker.removeprefix("gw")) % count]


def pytest_runtest_logreport(report):
    """Print the name of a failed test and its error at once. pytest-xdist brings the reports to its main process."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        crash = getattr(report.longrepr, "reprcrash", None)
        why = (crash.message if crash else report.longreprtext).strip().partition("\n")[0]
        print(f"\nFAILED {report.nodeid} ({report.when}): {why}", file=sys.stderr, flush=True)


@pytest.fixture
def two_cards() -> dict[str, str]:
    """The variable with which a started run sees two GPUs. Skips the test if there are fewer."""
    if len(CARDS) < 2:
        pytest.skip(f"needs two GPUs, and this machine has {len(CARDS)}")
    return {"CUDA_VISIBLE_DEVICES": ",".join(CARDS[:2])}


def pytest_collection_modifyitems(items):
    """Mark every test in this folder as a GPU test."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason=SKIP_REASON))


@pytest.fixture(autouse=True)
def _restore_state():
    """Seed before each test. After it, restore the process-wide switches that techniques set and free GPU memory."""
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
