"""The comparison of a sweep that stops the losers with one that does not."""

from __future__ import annotations

import importlib.util
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "study" / "sweep_cost.py"


def test_winner_is_compared_by_its_loss_in_the_sweep_that_ran_all():
    spec = importlib.util.spec_from_file_location("sweep_cost", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    every = {
        "seconds": 80.0,
        "runs": [{"trial": n, "loss": loss, "state": "done"} for n, loss in enumerate((3.0, 2.0, 2.5))],
    }
    halving = {
        "seconds": 20.0,
        "whole_runs": 2.5,
        "winner": 2,
        "runs": [{"trial": 2, "loss": 2.5}, {"trial": 1, "loss": 4.0}],
    }
    found = module.compare(halving, every)
    assert (found["time"], found["rank"], found["best"], found["worse_by"]) == (0.25, 2, 1, 0.25)
    assert found["same_bits"]
