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


def test_several_processes_of_a_launcher_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"WORLD_SIZE=2: fxtune .* trains on one device"):
        World.create()


def test_missing_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(HardwareError, match=r"run\.device=cuda, but torch sees no GPU here"):
        World.create(Device.cuda)


def test_memory_limit_on_a_cpu_is_refused():
    with pytest.raises(ConfigError, match=r"run\.memory_gib=1\.0 limits a GPU's memory"):
        World.create(Device.cpu, memory_gib=1.0)
