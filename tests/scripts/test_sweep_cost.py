"""The comparison of a sweep that stops the losers with one that does not."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "study"


@pytest.fixture(scope="module")
def sweep_cost():
    sys.path.insert(0, str(SCRIPTS))
    import sweep_cost

    sys.path.remove(str(SCRIPTS))
    return sweep_cost


def test_winner_is_compared_by_its_loss_in_the_sweep_that_ran_all(sweep_cost):
    every = {
        "wall_seconds": 90.0,
        "processor_seconds": 60.0,
        "runs": [
            {"trial": n, "loss": loss, "state": "done", "adapter": f"bits-{n}"}
            for n, loss in enumerate((3.0, 2.0, 2.5))
        ],
    }
    halving = {
        "wall_seconds": 60.0,
        "processor_seconds": 20.0,
        "whole_runs": 2.5,
        "winner": 2,
        "runs": [
            {"trial": 2, "loss": 2.5, "state": "done", "adapter": "bits-2"},
            {"trial": 1, "loss": 4.0, "state": "stopped"},
        ],
    }
    found = sweep_cost.compare(halving, every)
    assert (found["runs_time"], found["runs_processor"]) == (2.0, 1.0)
    assert (found["rank"], found["best"], found["worse_by"]) == (2, 1, 0.25)
    assert found["same_bits"]
    halving["runs"][0]["adapter"] = "others"
    assert not sweep_cost.compare(halving, every)["same_bits"]


def test_seconds_of_all_starts_are_added_up_without_libraries_and_steps(sweep_cost, tmp_path):
    lines = [
        {"train/step": 1, "startup/imports_seconds": 4.0, "startup/model_seconds": 1.0},
        {"train/step": 2},
        {"train/step": 3, "startup/model_seconds": 0.5, "startup/first_steps_seconds": 9.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert sweep_cost.startup([tmp_path / "metrics.jsonl"] * 2) == {"model": 3.0}
