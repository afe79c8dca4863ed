"""The device of a process, and what is refused."""

import os
import sys
from types import SimpleNamespace

import pytest
import torch

from fxtune.distributed import world as worlds
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


@pytest.fixture
def card(monkeypatch):
    """A card of 80 GiB, 30 of them used by process 7, and NVML."""
    gib = 2**30
    nvml = SimpleNamespace(
        NVMLError=OSError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: {"GPU-1a": "handle"}[uuid],
        nvmlDeviceGetComputeRunningProcesses=lambda _: [
            SimpleNamespace(pid=7, usedGpuMemory=30 * gib),
            SimpleNamespace(pid=os.getpid(), usedGpuMemory=gib),
        ],
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (49 * gib, 80 * gib))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(name="H200", uuid="1a"))
    return nvml


def test_card_that_others_use_is_refused_with_their_processes(card, monkeypatch):
    world = World(torch.device("cuda", 1))
    with pytest.raises(
        HardwareError, match=r"GPU 1 \(H200\) of .*: 30 of 80 GiB are taken, by process 7 \(30\.0 GiB\)"
    ):
        worlds._require_idle_cards(world)
    monkeypatch.setattr(card, "nvmlInit", lambda: (_ for _ in ()).throw(OSError))
    with pytest.raises(HardwareError, match=r"30 of 80 GiB are taken\nEnd them, or choose idle cards"):
        worlds._require_idle_cards(world)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (76 * 2**30, 80 * 2**30))
    worlds._require_idle_cards(world)
