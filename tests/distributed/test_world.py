"""The device of a process, and what is refused."""

import pytest
import torch

from fxtune.distributed.world import Device, World
from fxtune.errors import ConfigError, HardwareError


def test_cpu_world_has_the_facts_of_the_machine():
    world = World.create(Device.cpu)
    assert world.device == torch.device("cpu")
    facts = world.facts()
    assert (facts.device, facts.capability) == ("cpu", None)
    assert 0 < facts.free_memory <= facts.memory
    assert "torch" in facts.packages


def test_missing_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(HardwareError, match=r"run\.device=cuda, but torch sees no GPU here"):
        World.create(Device.cuda)


def test_one_process_needs_no_collective():
    world = World.create(Device.cpu)
    assert (world.rank, world.size, world.main) == (0, 1, True)
    assert world.agree(3) == 3
    assert world.gather("one") == ["one"]
    assert world.broadcast({"any": "value"}) == {"any": "value"}
    assert world.main_first(lambda: 5, "anything") == 5


def test_memory_limit_on_a_cpu_is_refused():
    with pytest.raises(ConfigError, match=r"run\.memory_gib=1\.0 limits a GPU's memory"):
        World.create(Device.cpu, memory_gib=1.0)
