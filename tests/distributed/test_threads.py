"""How many CPU threads there are, and how they wait."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OPENMP = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


def python(code: str, **environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**{k: v for k, v in os.environ.items() if k not in OPENMP}, "PYTHONPATH": str(ROOT), **environment},
    )
    return done.stdout.split()


@pytest.mark.parametrize("given", [{}, {"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "ACTIVE"}])
def test_threads_wait_passively_unless_the_environment_says_otherwise(given):
    """libgomp prints what it read when torch loads it."""
    code = (
        "import fxtune.cli.main, sys, os; assert 'torch' not in sys.modules; print(os.environ.get('OMP_WAIT_POLICY'))"
    )
    assert python(code, **given) == [given.get("OMP_WAIT_POLICY", "None" if given else "PASSIVE")]


def test_tests_wait_passively():
    assert os.environ.keys() & set(OPENMP[:3])


@pytest.mark.slow
def test_a_quota_limits_the_threads_and_the_environment_overrides_it():
    code = (
        "import torch\nfrom fxtune.distributed import world\nworld.cores = lambda: 3\ntorch.set_num_threads(8)\n"
        "world.World.create(world.Device.cpu); print(torch.get_num_threads())"
    )
    assert python(code) == ["3"]
    assert python(code, OMP_NUM_THREADS="8") == ["8"]
