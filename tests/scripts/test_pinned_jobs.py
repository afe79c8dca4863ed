"""scripts/study/pinned_jobs.py: jobs run once, on cores of their own, and in parts."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "study"
CORES = "import json, os; print('a line'); print(json.dumps({'cores': sorted(os.sched_getaffinity(0))}))"


@pytest.fixture(scope="module")
def pinned():
    sys.path.insert(0, str(SCRIPTS))
    import pinned_jobs

    sys.path.remove(str(SCRIPTS))
    return pinned_jobs


@pytest.fixture
def run(pinned, tmp_path):
    """run(jobs) with the options of a command line; returns what the file has."""

    def run(jobs, count=1, minutes=math.inf):
        pinned.BEGAN = pinned.time.monotonic()
        options = argparse.Namespace(json=tmp_path / "found.json", jobs=count, minutes=minutes)
        pinned.run_jobs([pinned.Job(key, [sys.executable, "-c", code], on) for key, code, on in jobs], options, str)
        return json.loads(options.json.read_text())

    return run


def test_each_job_has_one_core_and_is_done_once(run):
    count = min(2, len(os.sched_getaffinity(0)))
    found = run([("a", CORES, False), ("b", CORES, False)], count)
    assert [len(one["cores"]) for one in found.values()] == [1, 1]
    assert all(one["wall_seconds"] > 0 and one["processor_seconds"] > 0 for one in found.values())
    assert run([("a", "raise SystemExit(1)", False), ("b", CORES, False)]) == found


def test_failed_job_is_an_error_after_the_others(run, capsys):
    with pytest.raises(SystemExit, match=r"bad ended with 3: .*reason"):
        run([("bad", "import sys; sys.stderr.write('reason'); sys.exit(3)", False), ("good", CORES, False)])
    assert "good: " in capsys.readouterr().out


def test_job_that_the_time_limit_ends_goes_on_and_its_seconds_are_added(run, pinned, capsys):
    found = run([("a", "import time; time.sleep(60)", True), ("b", CORES, False)], minutes=0.02)
    assert found.keys() == {"a"}
    assert pinned.done(found, "a") is None
    assert "Not done yet: 2 of 2" in capsys.readouterr().out
    before = found["a"]["wall_seconds"]
    found = run([("a", CORES, True)])
    assert found["a"]["wall_seconds"] > before
    assert pinned.done(found, "a")["cores"]


def test_job_that_ends_well_after_the_time_limit_is_done(pinned, tmp_path):
    code = """trap 'echo "{\\"loss\\": 1}"; exit 0' TERM; sleep 60 & wait"""
    pinned.BEGAN = pinned.time.monotonic()
    options = argparse.Namespace(json=tmp_path / "found.json", jobs=1, minutes=0.02)
    pinned.run_jobs([pinned.Job("a", ["sh", "-c", code], True)], options, str)
    assert pinned.done(pinned.read(options.json), "a")["loss"] == 1
