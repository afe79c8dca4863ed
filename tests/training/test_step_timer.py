"""How long the parts of a step take."""

import time

import pytest
import torch

from fxtune.training.step_timer import StepTimer


def test_a_part_is_its_mean_since_the_last_read():
    timer = StepTimer(torch.device("cpu"))
    for _ in range(2):
        with timer.part("update"):
            time.sleep(0.002)
    with timer.part("passes"):
        pass
    found = timer.read()
    assert found["update"] >= 0.002
    assert found["passes"] >= 0
    assert timer.read() == {}


def test_a_part_that_fails_is_not_counted():
    timer = StepTimer(torch.device("cpu"))
    with pytest.raises(MemoryError), timer.part("passes"):
        raise MemoryError
    assert timer.read() == {}


def test_on_a_gpu_only_finished_parts_are_counted_and_nothing_waits(monkeypatch):
    done: set[int] = set()

    class Event:
        made = 0

        def __init__(self, enable_timing):
            self.number, Event.made = Event.made, Event.made + 1

        def record(self): ...

        def query(self):
            return self.number in done

        def elapsed_time(self, end):
            assert end.query()
            return 1000.0 * (end.number - self.number)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    timer = StepTimer(torch.device("cuda"))
    for name in ("passes", "update", "passes"):
        with timer.part(name):
            pass
    assert timer.read() == {}
    done |= {0, 1, 2, 3}
    assert timer.read() == {"passes": 1.0, "update": 1.0}
    done |= {4, 5}
    assert timer.read() == {"passes": 1.0}
    with timer.part("passes"):
        pass
    timer.restart()
    done |= {6, 7}
    assert timer.read() == {}
