"""scripts/bench/bench_experts.py on a CPU: each format of both mixtures, forward and backward."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench" / "bench_experts.py"


def test_each_format_of_both_mixtures_runs():
    done = subprocess.run([sys.executable, str(SCRIPT), "--smoke"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    headed = [line.partition(":")[0] for line in done.stdout.splitlines() if "TFLOP" in line]
    of_moe = ["moe, bf16", "moe, fp8", "moe, mxfp4", "moe, full", "moe, transformers"]
    assert headed == [*of_moe, "gpt_oss, bf16", "gpt_oss, mxfp4"]
    assert "fxtune::fp8_experts_backward" in done.stdout
