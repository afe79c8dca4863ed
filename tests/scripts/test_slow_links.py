"""scripts/study/slow_links.py: its runs compose, and its table has a line for each way to sum. Its runs take root."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

from fxtune.config import compose

STUDY = Path(__file__).resolve().parents[2] / "scripts" / "study"


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(STUDY))
    import slow_links

    sys.path.remove(str(STUDY))
    return slow_links


def test_runs_compose_and_each_way_is_a_line(script, cwd):
    args = argparse.Namespace(out=cwd, words=[])
    jobs = []
    for number, (mode, words) in enumerate(script.MODES.items()):
        for mbit, steps in ((None, 40), (25, 24)):
            one = script.job(args, mode, words, 0, mbit, steps)
            compose.check_jobs(compose.prepare(one["words"]))
            jobs.append(one | {"bytes": 1e6 * number, "seconds": 0.5, "loss": 0.25})
    assert len({one["name"] for one in jobs}) == len(jobs)
    lines = script.table(jobs, [0], [25]).splitlines()
    assert lines[0] == "|  | MB sent a step and rank | s a step, 25 Mbit/s | held-out loss, seeds 0 |"
    assert lines[4] == "| bfloat16 | 2.00 | 0.50 | 0.2500 |"
    assert len(lines) == 2 + len(script.MODES)
