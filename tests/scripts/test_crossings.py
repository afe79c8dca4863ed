"""scripts/faults/crossings.py: the array has each two values that a run can have, and is the same each time."""

from __future__ import annotations

import runpy
from itertools import combinations, product
from pathlib import Path

from support.crossings import FACTORS

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "faults" / "crossings.py"


def test_each_two_values_meet_in_one_of_a_hundred_cases():
    script = runpy.run_path(str(SCRIPT), run_name="crossings")
    cases, allowed = script["cases"](""), script["allowed"]
    met = {pair for case in cases for pair in script["pairs"](case)}
    for one, other in combinations(FACTORS, 2):
        for pair in product(FACTORS[one], FACTORS[other]):
            values = dict(zip((one, other), pair, strict=True))
            can = any(allowed({"rows": rows, **values}) for rows in FACTORS["rows"])
            assert (tuple(values.items()) in met) == can, values
    assert len(cases) <= 100
    assert all(allowed(case.values) for case in cases)
    assert cases == script["cases"]("")
    assert cases != script["cases"]("2")
