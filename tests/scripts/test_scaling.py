"""scripts/bench/scaling.py: several cards against one, by the same case."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "bench"
sys.path.insert(0, str(SCRIPTS))
import scaling  # noqa: E402

sys.path.remove(str(SCRIPTS))


def test_speed_is_compared_with_that_of_as_many_single_cards():
    one = dict(tokens_per_second=100.0, slowest_behind=None, exchange_seconds=0.0, step_seconds=1.0, memory_gib=70.0)
    two = {**one, "tokens_per_second": 196.0, "slowest_behind": 0.02, "exchange_seconds": 0.005}
    lines = scaling.table({"8b_4x4096": {"1": one, "2": two}}).splitlines()
    assert lines[2:] == [
        "| 8b_4x4096 | 1 | 100 | 1.000 |  | 0.00% | 70.0 |",
        "| 8b_4x4096 | 2 | 196 | 0.980 | +2.0% | 0.50% | 70.0 |",
    ]


@pytest.mark.slow
def test_two_processes_on_a_cpu_are_compared_with_one(cwd, monkeypatch, capsys):
    words = ["--smoke", "--steps", "2", "--scratch", str(cwd / "scratch"), "--json", "scaling.json"]
    monkeypatch.setattr(sys, "argv", ["scaling.py", *words])
    scaling.main()
    one, two = json.loads(Path("scaling.json").read_text())["smoke"].values()
    assert (one["ranks"], two["ranks"]) == (1, 2)
    assert two["slowest_rank"] in (0, 1)
    assert "| smoke | 2 | " in capsys.readouterr().out
