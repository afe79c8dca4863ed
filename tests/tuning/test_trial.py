"""A trial's process: how each way to end becomes a result, and that no process is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.harness import limit_counts_from, wait_for
from support.processes import alive

import fxtune
from fxtune.tuning import trial
from fxtune.tuning.trial import Outcome, TrialCache, TrialResult

HANGS = """
import os, pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(6000)"])
pathlib.Path("pids.new").write_text(f"{os.getpid()} {child.pid}")
os.rename("pids.new", "pids")
time.sleep(6000)
"""


@pytest.fixture
def program(cwd, monkeypatch):
    """Makes a Python program that stands in for `fxtune bench`. Its first argument is the file of --json."""

    def make(text: str) -> Path:
        path = cwd / "bench.py"
        path.write_text(text)
        monkeypatch.setattr(trial, "bench_command", lambda *given: [sys.executable, str(path), str(given[-1])])
        return path

    return make


def pids() -> list[int]:
    wait_for(Path("pids").exists)
    return [int(text) for text in Path("pids").read_text().split()]


def test_the_measurements_of_bench_become_a_result(program):
    program(
        "import json, sys\n"
        "found = {'tokens_per_second': 5.0, 'memory_gib': 1.5, 'losses': [3.0, None], 'data_wait': 0.1}\n"
        "json.dump(found, open(sys.argv[1], 'w'))"
    )
    result, found = trial.bench([], 1, 2)
    assert (result.outcome, result.tokens_per_second, result.peak, result.waited) == (Outcome.measured, 5.0, 1.5, 0.1)
    assert result.losses[0] == 3.0
    assert result.losses[1] != result.losses[1], "a loss that was not finite is NaN"
    assert found["memory_gib"] == 1.5


@pytest.mark.parametrize(
    ("text", "outcome", "reason"),
    [
        (
            "raise RuntimeError('illegal instruction')",
            Outcome.crashed,
            "exit code 1: RuntimeError: illegal instruction",
        ),
        ("import sys; print('fxtune: This cannot run:\\n  x'); sys.exit(2)", Outcome.refused, "This cannot run: x"),
        ("pass", Outcome.crashed, "its measurements cannot be read"),
    ],
    ids=["crash", "refusal", "nothing written"],
)
def test_a_process_that_fails_is_a_result_with_a_reason(program, text, outcome, reason):
    program(text)
    result = trial.measure([], 1, 60.0)
    assert result.outcome is outcome
    assert reason in result.reason


@pytest.mark.parametrize(
    ("code", "output", "outcome", "reason"),
    [
        (4, "fxtune: CUDA out of memory.\nWhat helps: less", Outcome.memory, "CUDA out of memory. What helps: less"),
        (1, "Traceback\n  x\ntorch.OutOfMemoryError: no", Outcome.memory, "torch.OutOfMemoryError: no"),
        (-9, "", Outcome.memory, "killed, most likely because the host ran out of memory"),
        (2, "note\nfxtune: wrong key", Outcome.refused, "wrong key"),
        (4, "fxtune: no GPU", Outcome.refused, "no GPU"),
        (5, "fxtune: not finite", Outcome.crashed, "exit code 5: not finite"),
        (-11, "", Outcome.crashed, "signal SIGSEGV: it printed nothing"),
    ],
)
def test_exit_code_and_output_decide_the_outcome(code, output, outcome, reason):
    result = trial.failure(code, output, 1.0)
    assert (result.outcome, result.reason) == (outcome, reason)


def test_at_its_time_limit_a_trial_and_its_children_are_killed(program, monkeypatch):
    program(HANGS)
    limit_counts_from(monkeypatch, Path("pids").exists)
    result = trial.measure([], 1, 0.1)
    assert (result.outcome, result.reason) == (Outcome.hung, "no result after 0 s: it printed nothing")
    wait_for(lambda: not any(map(alive, pids())))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
def test_however_the_search_ends_its_trial_ends(cwd, program, number):
    bench = program(HANGS)
    script = cwd / "search.py"
    script.write_text(f"""
import signal, sys
from fxtune.system.process.signals import SIGNALS
from fxtune.tuning import trial
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell starts with SIGINT ignored
trial.bench_command = lambda *_: [sys.executable, {str(bench)!r}]
with SIGNALS:
    trial.measure([], 1, 600)
""")
    environment = {**os.environ, "PYTHONPATH": str(Path(fxtune.__file__).parents[1])}
    process = subprocess.Popen([sys.executable, str(script)], stderr=subprocess.DEVNULL, env=environment)
    measuring, child = pids()
    try:
        process.send_signal(number)
        process.wait(600)
        wait_for(lambda: not alive(measuring))
        if number is not signal.SIGKILL:  # then the trial's children must watch for its end, as loader workers do
            wait_for(lambda: not alive(child))
    finally:
        process.kill()
        for pid in (measuring, child):
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


def test_the_cache_finds_what_it_kept_and_ignores_damage(tmp_path):
    cache, key = TrialCache(tmp_path / "new" / "trials.json"), {"candidate": {"rows": 2}, "repeat": 0}
    assert cache.find(key) is None
    kept = TrialResult(Outcome.measured, 1.0, 5.0, 1.5, (3.0, 2.0), 0.1)
    cache.keep(key, kept)
    assert cache.find(key) == TrialResult(**{**vars(kept), "cached": True})
    assert cache.find({**key, "repeat": 1}) is None
    assert TrialCache(cache.path, refresh=True).find(key) is None
    cache.path.write_text(cache.path.read_text()[:50])
    assert cache.find(key) is None
    TrialCache(Path("/proc/none/trials.json")).keep(key, kept)  # a folder that cannot be written is no error
