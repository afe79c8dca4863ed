"""The process of a sweep that trains: its answers, and what happens when it dies."""

from __future__ import annotations

import os
import signal

import pytest

from fxtune.tuning import sweep_worker
from fxtune.tuning.sweep_worker import DIED, SweepWorker, _answer


def test_mistake_and_bug_are_answers(cwd, monkeypatch, capsys):
    assert _answer("train", ["train.max_stps=3"]) == {
        "error": "on the command line: unknown key `train.max_stps`; did you mean `train.max_steps`?",
        "kind": "ConfigError",
    }
    monkeypatch.setattr(sweep_worker, "_train", lambda overrides: [][1])
    assert _answer("train", []) == {"error": "IndexError: list index out of range", "kind": "bug"}
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.slow
def test_process_that_dies_is_replaced(cwd):
    worker = SweepWorker({})
    try:
        worker.send("plan", ["train.max_stps=3"], cwd / "log")
        assert worker.receive()["kind"] == "ConfigError"
        assert "unknown key" in (cwd / "log").read_text()
        first = worker.process.pid
        worker.send("plan", ["+recipe=quickstart"], cwd / "log")
        os.kill(first, signal.SIGKILL)
        assert worker.receive() == {
            "error": "its process ended with signal SIGKILL, most likely because the host ran out of memory",
            "kind": DIED,
        }
        worker.send("plan", ["+recipe=quickstart", "train.max_steps=7"], cwd / "log")
        assert worker.receive() == {"steps": 7}
        assert worker.process.pid != first
    finally:
        worker.end()
