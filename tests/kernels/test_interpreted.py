"""The Triton kernels in Triton's interpreter, against their plain references (support/interpreted_NAME.py).

The interpreter must be chosen before triton is imported, so the comparisons run in a process of their own, one after
another.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).resolve().parents[1] / "support"
COMPARED = {
    "cross_entropy": "11 compared",
    "fp8": "22 compared",
    "fp8_training": "8 compared",
    "fp8_experts": "4 compared",
    "experts": "6 compared",
    "lora": "14 compared",
    "rotary": "9 compared",
    "mxfp4": "compared",
}
"""What each script prints at its end."""
RUN_ALL = """
import runpy, sys, traceback
for file in sys.argv[1:]:
    try:
        runpy.run_path(file)
    except Exception:
        print(traceback.format_exc().replace("\\n", " | "))
"""


@pytest.fixture(scope="module")
def printed() -> dict[str, str]:
    """The line that each script prints."""
    pytest.importorskip("triton")
    run = subprocess.run(
        [sys.executable, "-c", RUN_ALL, *(str(SUPPORT / f"interpreted_{name}.py") for name in COMPARED)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(SUPPORT.parents[1])},
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return dict(zip(COMPARED, run.stdout.splitlines(), strict=True))


@pytest.mark.vital
@pytest.mark.parametrize("name", COMPARED)
def test_triton_kernels_equal_their_plain_references(name, printed):
    assert printed[name] == COMPARED[name]
