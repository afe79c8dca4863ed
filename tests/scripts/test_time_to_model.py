"""scripts/study/time_to_model.py: it trains each lever once, continues where it stopped, and prints a row for each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def run(file: Path, *words: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "study" / "time_to_model.py"), "--json", str(file), *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


def test_each_lever_is_trained_once_and_compared_with_the_default(tmp_path):
    file = tmp_path / "time.json"
    lines = run(file, "--smoke")
    found = json.loads(file.read_text())
    rows = [line for line in lines if line.startswith("| orders")]
    assert len(found) == len(rows) == 3
    assert "| cosine | 1 | 4 (0) |" in rows[0]
    assert "1.00x (1.00 to 1.00)" in rows[0]
    assert all(one["evaluations"] and one["seconds"] > 0 for one in found.values())
    assert [line for line in run(file, "--smoke") if line.startswith("| orders")] == rows
    assert json.loads(file.read_text()) == found, "finished runs are not trained again"
