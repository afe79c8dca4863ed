"""Limits on processor time and memory hold, and are lifted afterwards."""

from __future__ import annotations

import multiprocessing
import time

import pytest

from fxtune.system.process.resource_limits import LimitExceeded, limit_resources


def _run_limited(seconds: float, more: int, work: str) -> str:
    try:
        with limit_resources(seconds, more):
            exec(work)  # what the tests below hand in
    except LimitExceeded as limit:
        return str(limit)
    return "done"


ONCE = """
import gc, time
def callback(phase, info):  # what is raised in here goes nowhere
    gc.callbacks.remove(callback)
    until = time.process_time() + 1
    while time.process_time() < until: pass
gc.callbacks.append(callback)
gc.collect()
until = time.process_time() + 5
while time.process_time() < until: pass
"""


def _burn(seconds: float) -> None:
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


SLOW_TO_FREE = """
def fill():
    return [-x for x in iter(float, 1.0)]
fill()
"""
"""Fills memory in small pieces until it is stopped. To free them takes longer than the time between two alarms."""


def test_work_whose_memory_takes_long_to_free_ends_with_the_message():
    with multiprocessing.get_context("fork").Pool(1) as pool:
        for seconds, more, message in (
            (1, 1 << 40, "more than 1 s of processor time"),
            (60, 100 << 20, "more than 100 MiB of memory"),
        ):
            assert pool.apply(_run_limited, (seconds, more, SLOW_TO_FREE)) == message
        assert pool.apply(_run_limited, (60, 100 << 20, "x = bytearray(10 << 20)")) == "done", "limits are lifted"


@pytest.mark.slow
def test_limits_hold_and_are_lifted_afterwards():
    with multiprocessing.get_context("fork").Pool(1) as pool:

        def run(work: str, seconds: float = 0.3) -> str:
            return pool.apply(_run_limited, (seconds, 100 << 20, work))

        assert run("while True: pass") == "more than 0.3 s of processor time"
        assert run("while True:\n try: sum(range(1000))\n except Exception: pass").startswith("more than 0.3 s")
        assert run("import re; re.fullmatch('(a*)*b', 'a' * 60)").startswith("more than 0.3 s")
        assert run(ONCE).startswith("more than 0.3 s"), "an alarm inside a callback is repeated"
        assert run("x = bytearray(1 << 30)") == "more than 100 MiB of memory"
        assert run("x = bytearray(10 << 20)") == "done"
        assert run("import time; time.sleep(0.5)") == "done", "waiting takes no processor time"
        assert run("with limit_resources(60, 1 << 40):\n while True: pass").startswith("more than 0.3 s"), (
            "the outer one counts"
        )
        assert pool.apply(eval, ("len(bytearray(200 << 20))",)), "no limit is left behind"
        with pytest.raises(ZeroDivisionError):
            run("1 / 0")
