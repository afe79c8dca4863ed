"""scripts/faults/kill.py: without --modes it kills runs of all modes."""

from __future__ import annotations

import runpy
from pathlib import Path

from support.killing import MODES

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "faults" / "kill.py"


def test_each_mode_has_a_share_of_the_kills():
    shares = runpy.run_path(str(SCRIPT), run_name="kill")["SHARES"]
    assert shares.keys() == MODES.keys()
    assert min(shares.values()) > 0
