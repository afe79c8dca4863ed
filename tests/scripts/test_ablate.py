"""scripts/bench/ablate.py: real runs give rows, a refused case has a row, and the next call continues."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.cases import slow_but

from fxtune.config.compose import load

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench" / "ablate.py"
spec = importlib.util.spec_from_file_location("ablate", SCRIPT)
ablate = importlib.util.module_from_spec(spec)
spec.loader.exec_module(ablate)


def test_script_runs_from_any_folder(cwd):
    done = subprocess.run([sys.executable, str(SCRIPT), "--minutes", "0"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "Not run, the time limit (0 minutes) was reached: 8b 4096 plain" in done.stdout


@pytest.mark.slow
def test_measured_and_refused_cases_and_time_limit(cwd, chats, monkeypatch, capsys):
    """Each case runs in a real process.

    The second is refused for an unknown value, which does not depend on the machine.
    """
    common = ("--smoke", "--data", str(chats), "--json", "out.json")
    monkeypatch.setitem(ablate.TECHNIQUES, "flash4", ("techniques.attention.backend=flash5",))
    monkeypatch.setattr(sys, "argv", ["ablate.py", *common, "--cases", "plain,flash4"])
    began = time.monotonic()
    ablate.main()
    seconds = time.monotonic() - began
    out = capsys.readouterr().out
    rows = json.loads(Path("out.json").read_text())
    plain, refused = rows["tiny 256 plain"], rows["tiny 256 flash4"]
    assert plain["tokens_per_second"] > 0
    assert plain["memory_gib"] > 0.05
    # The median step, and tokens by the mean step: half of the steps take the median or longer.
    assert 0 < plain["step_seconds"] < 2 * 256 / plain["tokens_per_second"]
    assert 4 * 256 / plain["tokens_per_second"] < seconds, "four steps"
    assert refused["error"].startswith("refused: ")
    assert "techniques.attention.backend" in refused["error"]
    assert f"| tiny | 1 x 256 | plain | {plain['tokens_per_second']:,.0f} |" in out
    assert "1.00x" in out

    monkeypatch.setattr(sys, "argv", ["ablate.py", *common, "--cases", "plain,full", "--minutes", "0"])
    ablate.main()
    out = capsys.readouterr().out
    assert "Not run, the time limit (0 minutes) was reached: tiny 256 full" in out, "the file holds plain"
    assert json.loads(Path("out.json").read_text()) == rows


@pytest.mark.parametrize("length", slow_but(ablate.LENGTHS, 16384))
def test_every_case_composes_and_differs_from_the_others(length, cwd):
    by_case = {}
    for _, _, case in ablate.cases_to_run(["8b"], [length], list(ablate.CASES)):
        by_case[case] = load(ablate.settings(length, case)).techniques
        assert ablate.label({"length": length, "case": case})
    for case, techniques in by_case.items():
        assert [techniques == other for other in by_case.values()].count(True) == 1, f"{case} equals another case"
