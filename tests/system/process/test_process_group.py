"""A command and its children end together, whatever ends them. How a search ends its trials: tests/tuning."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from support.harness import limit_counts_from, wait_for
from support.processes import alive

from fxtune.system.process.process_group import TAIL, run_process


def test_exit_code_end_of_output_and_time_are_returned():
    code, output, seconds = run_process(
        [
            sys.executable,
            "-c",
            f"import sys; print('a' * {TAIL}, flush=True); print('last', file=sys.stderr); sys.exit(3)",
        ]
    )
    assert code == 3
    assert output.endswith("last\n")
    assert len(output) == TAIL
    assert seconds > 0


def test_a_process_imports_this_fxtune():
    code, output, _ = run_process(
        [sys.executable, "-c", "import os; os.chdir('/'); import fxtune; print(fxtune.__file__)"]
    )
    assert code == 0
    assert Path(output.strip()).parents[1] == Path(__file__).resolve().parents[3]


def test_a_file_of_the_user_does_not_replace_a_module(cwd):
    Path("numbers.py").write_text("raise SystemExit('imported')")
    code, output, _ = run_process([sys.executable, "-c", "import numbers; print(numbers.Number)"])
    assert code == 0, output


def test_a_signal_is_a_negative_code():
    code, _, _ = run_process([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
    assert code == -signal.SIGKILL


def test_at_its_limit_the_process_and_its_children_end(cwd, monkeypatch):
    script = (
        "import os, pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(6000)'])\n"
        "print('waits', flush=True); pathlib.Path('pid.new').write_text(str(child.pid)); os.rename('pid.new', 'pid')\n"
        "time.sleep(6000)"
    )
    limit_counts_from(monkeypatch, Path("pid").exists)
    code, output, _ = run_process([sys.executable, "-c", script], limit=0.1)
    assert (code, output) == (None, "waits\n")
    pid = int(Path("pid").read_text())
    wait_for(lambda: not alive(pid))
