"""How long the parts of a step take."""

from types import SimpleNamespace

import pytest
import torch

from fxtune.training.monitors import step_timer
from fxtune.training.monitors.step_timer import StepTimer


def test_a_part_is_its_mean_since_the_last_read(monkeypatch):
    clock = iter([0.0, 1.0, 10.0, 13.0, 20.0, 20.5])
    monkeypatch.setattr(step_timer, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    timer = StepTimer(torch.device("cpu"))
    for _ in range(2):
        with timer.part("update"):
            pass
    with timer.part("passes"):
        pass
    assert timer.read() == {"update": 2.0, "passes": 0.5}
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
