"""scripts/study/refresh_rates.py: no row is used twice, and its table counts what went wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "study"


@pytest.fixture(scope="module")
def rates():
    sys.path[:0] = [str(SCRIPTS), str(SCRIPTS.parent / "make")]
    import refresh_rates

    del sys.path[:2]
    return refresh_rates


def test_no_row_is_used_twice(rates, tmp_path):
    seed = rates.Seed(tmp_path, 3, 2)
    groups = [seed.rows[: rates.PARENT_ROWS], seed.judging()]
    groups += [seed.batch(name, index) for name in (rates.UNDRIFTED, rates.DRIFTED, rates.WORSE) for index in (0, 1)]
    rows = [json.dumps(row) for group in groups for row in group]
    assert len(set(rows)) == len(rows) == len(seed.rows)
    assert rates.Seed(tmp_path, 3, 2).rows == seed.rows


@pytest.mark.parametrize("index", range(5))
def test_each_kind_of_drift_changes_rows(rates, tmp_path, index):
    rows, kind = rates.pool(0, 30), rates.KINDS[index]
    changed = [one != two for one, two in zip(rows, rates.drifted(rows, kind), strict=True)]
    assert sum(changed) == (10 if kind == rates.MIXED else 30)


def test_table_counts_errors(rates):
    def drift(kind: str, found: bool) -> dict:
        return {"kind": kind, "found": found, "old_loss": 0.1, "new_loss": 0.2, "p": 0.3}

    def gate(passed: bool) -> dict:
        return {"how": "noise", "passed": passed, "worse_on_old": 0.1, "better_on_new": 0.5}

    tested = {
        rates.UNDRIFTED: [drift("", False), drift("", True), drift("", False)],
        rates.DRIFTED: [drift("capitals", True), drift("capitals", False)],
        rates.WORSE: [gate(False), gate(True)],
    }
    lines = rates.table(tested).splitlines()
    assert lines[:3] == [
        "false alarms: 1 of 3 undrifted batches",
        "drift seen: 1 of 2 drifted batches",
        "wrong promotions: 1 of 2 worse adapters",
    ]
    assert "| capitals | 2 | 1 | 0.1000 | 0.2000 | 0.3 |" in lines
    assert "| noise | 2 | 1 | +0.100 (+0.100 to +0.100) | +0.500 (+0.500 to +0.500) |" in lines
